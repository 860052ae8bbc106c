"""Draws the dashboard from its own JSON, with its own queries put to a running Prometheus.

For where there is no Grafana: the panels, units, thresholds and places are the dashboard's; the
strokes are matplotlib's.

    python -m deploy.pictures.dashboard.render http://127.0.0.1:9090 \
        --model demo --minutes 30 --out dash.png
"""

import argparse
import io
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from deploy.grafana.dashboard import OUTPUT as DASHBOARD
from deploy.grafana.panels import COLUMNS
from deploy.grafana.prometheus import Asking, Prometheus
from deploy.pictures.dashboard.canvas import MUTED, NAMED, TEXT, Box, Canvas
from deploy.pictures.dashboard.draw import Mark, draw

Json = dict[str, Any]
WIDTH = 1680
GAP = 8
HEADER_HEIGHT = 46
UNIT_HEIGHT = 38  # of a panel's height, as in Grafana


def drawn(dashboard: Json, asking: Asking, variables: dict[str, str]) -> Canvas:
    panels = dashboard["panels"]
    units = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    canvas = Canvas(WIDTH, HEADER_HEIGHT + units * UNIT_HEIGHT + GAP)
    FigureCanvasAgg(canvas.figure)
    _header(canvas, dashboard, asking, variables)
    marks = list(_marks(dashboard, asking))
    for panel in panels:
        box = _box(panel["gridPos"])
        if panel["type"] == "row":
            canvas.text(box.x + 2, box.y + box.height / 2 + 2, f"⌄  {panel['title']}", 10)
        else:
            draw(canvas, box, panel, asking, marks)
    return canvas


def _header(canvas: Canvas, dashboard: Json, asking: Asking, variables: dict[str, str]) -> None:
    middle = HEADER_HEIGHT / 2 + 2
    canvas.text(GAP + 4, middle, dashboard["title"], 13, TEXT)
    x = 300.0
    for name, value in variables.items():
        shown = canvas.text(x, middle, f"{name}: {value}", 9, MUTED)
        x += canvas.width_of(shown) + 24
    for mark in dashboard["annotations"]["list"]:
        shown = canvas.text(x, middle, f"┊ {mark['name']}", 9, NAMED[mark["iconColor"]])
        x += canvas.width_of(shown) + 24
    first, last = (
        datetime.fromtimestamp(moment, UTC) for moment in (asking.times[0], asking.times[-1])
    )
    text = f"{first:%Y-%m-%d %H:%M:%S} to {last:%H:%M:%S} UTC"
    canvas.text(WIDTH - GAP - 4, middle, text, 9, MUTED, ha="right")


def _box(at: Json) -> Box:
    column = (WIDTH - GAP) / COLUMNS
    return Box(
        GAP + at["x"] * column,
        HEADER_HEIGHT + at["y"] * UNIT_HEIGHT,
        at["w"] * column - GAP,
        at["h"] * UNIT_HEIGHT - GAP,
    )


def _marks(dashboard: Json, asking: Asking) -> Iterator[Mark]:
    """Where an annotation's query begins to have a value; what held from the first is no event."""
    for mark in dashboard["annotations"]["list"]:
        for series in asking.over_time(mark["expr"]):
            known = ~np.isnan(series.values)
            for start in np.flatnonzero(known[1:] & ~known[:-1]) + 1:
                yield Mark(float(asking.times[start]), NAMED[mark["iconColor"]])


def png(canvas: Canvas) -> bytes:
    """With a palette: a third of the bytes, and nobody sees the difference."""
    plain, packed = io.BytesIO(), io.BytesIO()
    canvas.figure.savefig(plain, format="png", facecolor=canvas.figure.get_facecolor())
    image = Image.open(plain).convert("RGB")
    image = image.quantize(256, Image.Quantize.MEDIANCUT, kmeans=3, dither=Image.Dither.NONE)
    image.save(packed, format="PNG", optimize=True)
    return packed.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prometheus", help="its address")
    parser.add_argument("--model", required=True)
    parser.add_argument("--version", default=".+", help="a regular expression")
    parser.add_argument("--minutes", type=float, default=30, help="until now")
    parser.add_argument("--scrape-seconds", type=float, default=5, help="Prometheus' interval")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    picture = of_prometheus(
        given.prometheus,
        model=given.model,
        version=given.version,
        seconds=60 * given.minutes,
        scrape_seconds=given.scrape_seconds,
    )
    given.out.write_bytes(picture)


def of_prometheus(
    url: str, *, model: str, version: str = ".+", seconds: float, scrape_seconds: float
) -> bytes:
    end = time.time()
    step = max(scrape_seconds, seconds / 400)
    # Grafana's own rule for $__rate_interval.
    interval = max(step + scrape_seconds, 4 * scrape_seconds)
    filled = {"$model": model, "$version": version, "$__rate_interval": f"{interval * 1000:.0f}ms"}
    asking = Prometheus(url, end - seconds, end, step, filled)
    shown = {"model": model, "version": "All" if version == ".+" else version}
    return png(drawn(json.loads(DASHBOARD.read_text(encoding="utf-8")), asking, shown))


if __name__ == "__main__":
    main()
