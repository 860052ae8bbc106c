"""A sheet measured in pixels, in Grafana's dark colours: frames, texts, legends and axes on it."""

from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text

DPI = 100
BACKGROUND, SURFACE, BORDER, GRID = "#111217", "#181b1f", "#2b2e36", "#2a2c33"
TEXT, MUTED, LINK = "#d5d6e2", "#9a9ba8", "#6e9fff"
NAMED = {
    "green": "#73bf69",
    "orange": "#ff9830",
    "red": "#f2495c",
    "blue": "#5794f2",
    "purple": "#b877d9",
}
PALETTE = (
    "#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#56d9fe",
    "#c4162a", "#96d98d",
)  # fmt: skip


@dataclass(frozen=True)
class Box:
    """In pixels, from the upper left corner."""

    x: float
    y: float
    width: float
    height: float

    def inside(self, left: float, top: float, right: float, bottom: float) -> "Box":
        return Box(
            self.x + left,
            self.y + top,
            self.width - left - right,
            self.height - top - bottom,
        )


class Canvas:
    def __init__(self, width: float, height: float) -> None:
        self._width, self._height = width, height
        self.figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor=BACKGROUND)
        self._sheet = self.figure.add_axes((0, 0, 1, 1))
        self._sheet.set_axis_off()
        self._sheet.set(xlim=(0, width), ylim=(height, 0))

    def axes(self, box: Box) -> Axes:
        """For a graph; without a frame."""
        axes = self.figure.add_axes(
            (
                box.x / self._width,
                1 - (box.y + box.height) / self._height,
                box.width / self._width,
                box.height / self._height,
            ),
            facecolor="none",
        )
        axes.spines[:].set_visible(False)
        axes.tick_params(colors=MUTED, labelsize=7.5, length=0)
        return axes

    def frame(self, box: Box) -> None:
        self._sheet.add_patch(
            FancyBboxPatch(
                (box.x, box.y),
                box.width,
                box.height,
                boxstyle="round,pad=0,rounding_size=3",
                facecolor=SURFACE,
                edgecolor=BORDER,
                linewidth=0.8,
            )
        )

    def rule(self, x: float, y: float, width: float, colour: str = BORDER) -> None:
        self._sheet.plot([x, x + width], [y, y], color=colour, linewidth=0.8)

    def text(
        self, x: float, y: float, text: str, size: float = 8, colour: str = TEXT, **rest: Any
    ) -> Text:
        """Around the height y; letters that reach below the line do not lift it."""
        base = y + 0.36 * size * DPI / 72
        return self._sheet.text(
            x, base, text, fontsize=size, color=colour, va="baseline", parse_math=False, **rest
        )

    def width_of(self, text: Text) -> float:
        return float(text.get_window_extent().width)

    def legend(self, box: Box, entries: list[tuple[str, str]]) -> None:
        """Names and colours from left to right, on as many lines as the box has room for."""
        x, y = box.x, box.y + 8
        for number, (name, colour) in enumerate(entries):
            text = self.text(x + 16, y, name, 7.5, TEXT)
            width = 16 + self.width_of(text) + 12
            if x > box.x and x + width - 12 > box.x + box.width:
                x, y = box.x, y + 15
                if y > box.y + box.height:
                    text.remove()
                    self.text(box.x + box.width, y - 15, f"+{len(entries) - number}", 7, MUTED)
                    return
                text.set_position((x + 16, text.get_position()[1] + 15))
            self._sheet.plot([x, x + 11], [y, y], color=colour, linewidth=2.5)
            x += width
