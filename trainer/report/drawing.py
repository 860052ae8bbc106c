"""How the pictures of a report look, and how one becomes a PNG in memory."""

import io
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DPI = 160
OURS = "#D55E00"  # the colour of a layer of ours
INK, FAINT, RULE = "#222222", "#6b6b6b", "#dddddd"
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "savefig.facecolor": "white",
}


@contextmanager
def drawing(width: float, height: float) -> Iterator[Figure]:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def round_numbers(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... within the range; only powers of ten if it is wide."""
    steps = (1, 2, 5) if high / low < 500 else (1,)
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    return [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
