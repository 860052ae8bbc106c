"""How each kind of panel is drawn from its JSON and from Prometheus' answers."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from deploy.grafana.prometheus import Asking, Series
from deploy.pictures.dashboard.canvas import GRID, LINK, MUTED, NAMED, PALETTE, TEXT, Box, Canvas
from deploy.pictures.dashboard.units import written

Json = dict[str, Any]
TITLE_HEIGHT = 30
LEGEND_HEIGHT = 32
TABLE_ROW_HEIGHT = 24
STAT_SIZE = 24
PIXELS_A_TIME = 110  # between two times on an axis
EMPTY = "No data"


class Mark:
    """An annotation: a moment at which something happened."""

    def __init__(self, moment: float, colour: str) -> None:
        self.moment, self.colour = moment, colour


def draw(canvas: Canvas, box: Box, panel: Json, asking: Asking, marks: Sequence[Mark]) -> None:
    canvas.frame(box)
    canvas.text(box.x + 10, box.y + 16, panel["title"], 9, TEXT)
    KINDS[panel["type"]](canvas, box, panel, asking, marks)


def _empty(canvas: Canvas, box: Box) -> None:
    middle = box.y + TITLE_HEIGHT + (box.height - TITLE_HEIGHT) / 2
    canvas.text(box.x + box.width / 2, middle, EMPTY, 10, MUTED, ha="center")


# --- stat --------------------------------------------------------------------------------------


def _stat(canvas: Canvas, box: Box, panel: Json, asking: Asking, marks: Sequence[Mark]) -> None:
    del marks
    (target,) = panel["targets"]
    found = asking.over_time(target["expr"])
    if not found or np.isnan(found[0].last):
        return _empty(canvas, box)
    defaults = panel["fieldConfig"]["defaults"]
    values = found[0].values
    colour = threshold_colour(found[0].last, defaults.get("thresholds"))
    axes = canvas.axes(box.inside(1, box.height * 0.62, 1, 1))
    axes.set_axis_off()
    times = asking.times
    known = ~np.isnan(values)
    axes.fill_between(times[known], values[known], color=colour, alpha=0.18, linewidth=0)
    axes.plot(times[known], values[known], color=colour, linewidth=1.2)
    top = float(np.nanmax(values))
    axes.set(xlim=(times[0], times[-1]), ylim=(0, top * 1.15 if top > 0 else 1))
    text = written(found[0].last, defaults["unit"], defaults.get("decimals"))
    shown = canvas.text(box.x + box.width / 2, box.y + 66, text, STAT_SIZE, colour, ha="center")
    shown.set_fontsize(STAT_SIZE * min(1.0, (box.width - 24) / canvas.width_of(shown)))
    return None


def threshold_colour(value: float, thresholds: Json | None) -> str:
    if thresholds is None:
        return NAMED["green"]
    reached = [s["color"] for s in thresholds["steps"] if s["value"] is None or value >= s["value"]]
    return NAMED[reached[-1]]


# --- graphs over time --------------------------------------------------------------------------


def _timeseries(
    canvas: Canvas, box: Box, panel: Json, asking: Asking, marks: Sequence[Mark]
) -> None:
    found = [
        (series.name(target["legendFormat"]), series)
        for target in panel["targets"]
        for series in asking.over_time(target["expr"])
        if not np.isnan(series.values).all()
    ]
    if not found:
        return _empty(canvas, box)
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults["custom"]
    axes = canvas.axes(box.inside(66, TITLE_HEIGHT + 6, 14, LEGEND_HEIGHT + 24))
    times = asking.times
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    below = np.zeros(len(times))
    top = float(custom.get("axisSoftMax", 0))
    for number, (_, series) in enumerate(found):
        colour = PALETTE[number % len(PALETTE)]
        values = series.values
        if custom.get("stacking"):
            values = below + np.nan_to_num(values)
        axes.fill_between(
            times, below, values, color=colour, alpha=custom["fillOpacity"] / 100, linewidth=0
        )
        axes.plot(times, values, color=colour, linewidth=1.5)
        if custom.get("stacking"):
            below = values
        top = max(top, float(np.nanmax(values)))
    top = float(defaults.get("max", top * 1.08 or 1.0))
    axes.set(xlim=(times[0], times[-1]), ylim=(defaults.get("min", 0), top))
    if "thresholdsStyle" in custom:
        for step in defaults["thresholds"]["steps"]:
            if step["value"] is not None and step["value"] <= top:
                axes.axhline(
                    step["value"], color=NAMED[step["color"]], linewidth=1.1, linestyle=(0, (5, 4))
                )
    _mark(axes, marks)
    _clock(axes)
    unit = defaults["unit"]
    axes.yaxis.set_major_locator(
        MultipleLocator(2.0 ** round(np.log2(top / 4))) if unit == "bytes" else MaxNLocator(5)
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, unit)))
    entries = [(name, PALETTE[n % len(PALETTE)]) for n, (name, _) in enumerate(found)]
    canvas.legend(
        Box(box.x + 12, box.y + box.height - LEGEND_HEIGHT, box.width - 24, LEGEND_HEIGHT - 8),
        entries,
    )
    return None


def _mark(axes: Axes, marks: Sequence[Mark]) -> None:
    for mark in marks:
        axes.axvline(mark.moment, color=mark.colour, linewidth=1, linestyle=(0, (2, 3)))


def _clock(axes: Axes) -> None:
    first, last = axes.get_xlim()

    def time_of_day(moment: float, _: int) -> str:
        if moment < first + 0.05 * (last - first):
            return ""  # it would stand on the other axis' numbers
        return datetime.fromtimestamp(moment, UTC).strftime("%H:%M:%S")

    axes.xaxis.set_major_locator(MaxNLocator(max(2, round(axes.bbox.width / PIXELS_A_TIME))))
    axes.xaxis.set_major_formatter(FuncFormatter(time_of_day))


def _heatmap(canvas: Canvas, box: Box, panel: Json, asking: Asking, marks: Sequence[Mark]) -> None:
    (target,) = panel["targets"]
    found = sorted(
        asking.over_time(target["expr"]), key=lambda series: series.name(target["legendFormat"])
    )
    if not found:
        return _empty(canvas, box)
    times = asking.times
    names = [series.name(target["legendFormat"]) for series in found]
    values = np.stack([series.values for series in found])
    axes = canvas.axes(box.inside(52, TITLE_HEIGHT + 6, 16, 74))
    image = axes.imshow(
        values,
        cmap="inferno",
        vmin=0,
        vmax=panel["options"]["color"]["max"],
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        extent=(times[0], times[-1], -0.5, len(names) - 0.5),
    )
    every = max(1, len(names) // 10)
    axes.set_yticks(range(0, len(names), every), names[::every])
    axes.set_ylabel(panel["options"]["yAxis"]["axisLabel"], color=MUTED, fontsize=7.5)
    _mark(axes, marks)
    _clock(axes)
    scale = canvas.axes(Box(box.x + 52, box.y + box.height - 36, 240, 10))
    bar = canvas.figure.colorbar(image, cax=scale, orientation="horizontal")
    bar.outline.set_visible(False)
    scale.tick_params(colors=MUTED, labelsize=7, length=0)
    unit = panel["fieldConfig"]["defaults"]["unit"]
    scale.xaxis.set_major_locator(MaxNLocator(4))
    scale.xaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, unit)))
    return None


# --- what holds now ----------------------------------------------------------------------------


def _barchart(canvas: Canvas, box: Box, panel: Json, asking: Asking, marks: Sequence[Mark]) -> None:
    del marks
    rows = _rows(panel, asking)
    if not rows:
        return _empty(canvas, box)
    field = panel["options"]["xField"]
    columns = [target["legendFormat"] for target in panel["targets"]]
    defaults = panel["fieldConfig"]["defaults"]
    axes = canvas.axes(box.inside(60, TITLE_HEIGHT + 6, 14, 54))
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    width = 0.9 / len(columns)
    for number, column in enumerate(columns):
        heights = [row.get(column, np.nan) for row in rows]
        places = np.arange(len(rows)) + (number - (len(columns) - 1) / 2) * width
        axes.bar(
            places,
            heights,
            width,
            color=PALETTE[number],
            alpha=defaults["custom"]["fillOpacity"] / 100,
            linewidth=0,
        )
    axes.set_xlim(-0.7, len(rows) - 0.3)
    axes.set_ylim(bottom=defaults["min"])
    every = max(1, len(rows) // 20)
    axes.set_xticks(range(0, len(rows), every), [str(row[field]) for row in rows][::every])
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: written(v, defaults["unit"])))
    canvas.legend(
        Box(box.x + 12, box.y + box.height - 26, box.width - 24, 18),
        [(column, PALETTE[number]) for number, column in enumerate(columns)],
    )
    return None


def _table(canvas: Canvas, box: Box, panel: Json, asking: Asking, marks: Sequence[Mark]) -> None:
    del marks
    rows = _rows(panel, asking)
    if not rows:
        return _empty(canvas, box)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    units = {
        override["matcher"]["options"]: override["properties"][0]["value"]
        for override in panel["fieldConfig"]["overrides"]
    }
    cells = [
        [_cell(row.get(column), units.get(column, "short")) for column in columns] for row in rows
    ]
    widest = [max(map(len, column)) + 2 for column in zip(columns, *cells, strict=True)]
    places = box.x + 12 + (box.width - 24) / sum(widest) * np.cumsum([0, *widest[:-1]])
    y = box.y + TITLE_HEIGHT + TABLE_ROW_HEIGHT / 2
    for x, column in zip(places, columns, strict=True):
        canvas.text(x, y, column, 8, LINK)
    for texts in cells:
        y += TABLE_ROW_HEIGHT
        if y + TABLE_ROW_HEIGHT / 2 > box.y + box.height:
            break
        canvas.rule(box.x + 12, y - TABLE_ROW_HEIGHT / 2, box.width - 24)
        for x, text in zip(places, texts, strict=True):
            canvas.text(x, y, text, 8)
    return None


def _cell(value: object, unit: str) -> str:
    if isinstance(value, float):
        return "" if np.isnan(value) else written(value, unit)
    return "" if value is None else str(value)


def _rows(panel: Json, asking: Asking) -> list[dict[str, Any]]:
    """The answers joined by a label, as the panel's transformations say."""
    join, organize = (each["options"] for each in panel["transformations"])
    by = join["byField"]
    names = organize["renameByName"]
    rows: dict[str, dict[str, Any]] = {}
    for target in panel["targets"]:
        found: list[Series] = asking.at_end(target["expr"])
        for series in found:
            key = series.labels[by]
            row = rows.setdefault(key, {by: key})
            row.update(series.labels)
            row[names[f"Value #{target['refId']}"]] = series.last
    return [rows[key] for key in sorted(rows)]


KINDS: dict[str, Callable[[Canvas, Box, Json, Asking, Sequence[Mark]], None]] = {
    "stat": _stat,
    "timeseries": _timeseries,
    "heatmap": _heatmap,
    "barchart": _barchart,
    "table": _table,
}
