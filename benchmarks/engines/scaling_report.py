"""Tables and the picture of what `benchmarks.engines.scaling` measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.document import table
from benchmarks.engines.report import machine_line, time

Point = dict[str, Any]
Sweep = dict[str, Any]

OURS = "ours"
SPEEDUP = "flops_speedup"
HEADINGS = {
    "n_classes": "classes",
    "n_experts": "experts",
    "hidden_size": "hidden size",
    "k": "answers",
    "batch": "rows of a call",
}
LOOKS = {
    OURS: ("#D55E00", "o", "-"),
    "ONNX Runtime fp32": ("#0072B2", "s", "--"),
    "fastest full scan": ("#009E73", "D", "--"),
    "byte floor": ("#6b6b6b", "", ":"),
}


def ours(point: Point) -> float:
    return point["microseconds_per_row"][OURS]["mean_us"]


def full(point: Point) -> float:
    """The fastest of the full scans."""
    return point["microseconds_per_row"][point["fastest_full_scan"]]["mean_us"]


def onnx(point: Point) -> float:
    return point["microseconds_per_row"]["ONNX Runtime fp32"]["mean_us"]


def floor(point: Point) -> float | None:
    return None if point["floor"] is None else point["floor"]["floor_us"]


def line(point: Point) -> str:
    below = floor(point)
    shape = " ".join(f"{name}={point[key]}" for key, name in HEADINGS.items())
    return (
        f"{shape} V={point['classes_in_an_expert']}: ours {ours(point):.2f} us a row,"
        f" {point['fastest_full_scan']} {full(point):.2f}"
        + ("" if below is None else f", floor {below:.2f}")
    )


# --- where a full scan wins --------------------------------------------------------------------


def crossover(points: Sequence[Point], axis: str) -> str:
    """Between which values of the axis the faster one changes, in words."""
    wins = [ours(point) <= full(point) for point in points]
    values = [f"{point[axis]:,.4g}" if axis == SPEEDUP else f"{point[axis]:,}" for point in points]
    reach = f"from {values[0]} to {values[-1]}"
    if all(wins):
        return f"ours is faster all the way {reach}"
    if not any(wins):
        return f"a full scan is faster all the way {reach}"
    changes = [
        f"{'ours' if wins[place] else 'a full scan'} is faster from {values[place]} on"
        f" (at {values[place - 1]} it was not)"
        for place in range(1, len(points))
        if wins[place] != wins[place - 1]
    ]
    return "; ".join(changes)


def crossovers(results: dict[str, Any]) -> str:
    return "\n".join(
        f"- {sweep['name']}: {crossover(sweep['points'], sweep['axis'])}."
        for sweep in results["sweeps"]
    )


# --- tables ------------------------------------------------------------------------------------


def markdown(results: dict[str, Any], image: str) -> str:
    parts = [
        f"![time of a row against classes, experts, hidden size, answers and rows]({image})",
        crossovers(results),
        *(sweep_table(sweep) for sweep in results["sweeps"]),
        machine_line(results),
    ]
    return "\n\n".join(parts)


def sweep_table(sweep: Sweep) -> str:
    axis = sweep["axis"]
    header = [sweep["name"], "classes in an expert", "speedup in FLOPs"]
    header += ["ours, us a row", "fastest full scan", "ONNX Runtime fp32", "byte floor"]
    header += ["full scan / ours"]
    return table(header, (_row(point, axis) for point in sweep["points"]))


def _row(point: Point, axis: str) -> list[str]:
    below = floor(point)
    return [
        f"{point[axis]:,.0f}",
        f"{point['classes_in_an_expert']:,}",
        f"{point['flops_speedup']:.1f}x",
        time(ours(point)),
        f"{time(full(point))} ({point['fastest_full_scan']})",
        time(onnx(point)),
        "-" if below is None else time(below),
        f"{full(point) / ours(point):.1f}",
    ]


# --- the picture -------------------------------------------------------------------------------


def draw(results: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(13, 6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 4).ravel()
    for axes, sweep in zip(panels, results["sweeps"], strict=False):
        _panel(axes, sweep)
    for axes in panels[len(results["sweeps"]) :]:
        axes.set_axis_off()
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axes: Axes, sweep: Sweep) -> None:
    points, axis = sweep["points"], sweep["axis"]
    lines = {
        OURS: [(point[axis], ours(point)) for point in points],
        "ONNX Runtime fp32": [(point[axis], onnx(point)) for point in points],
        "fastest full scan": [(point[axis], full(point)) for point in points],
        "byte floor": [(p[axis], below) for p in points if (below := floor(p)) is not None],
    }
    for name, places in lines.items():
        if len(places) == 1 and len(points) > 1:  # a floor at one place is no line
            continue
        colour, marker, style = LOOKS[name]
        axes.plot(
            [x for x, _ in places],
            [y for _, y in places],
            color=colour,
            marker=marker,
            linestyle=style,
            linewidth=1.2,
            markersize=4,
            label=name,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(sweep["name"])
    axes.set_ylabel("microseconds a row")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
