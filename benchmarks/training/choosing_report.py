"""The picture and the table of what `benchmarks.training.choosing` measured."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.document import table
from benchmarks.engines.report import measured_on, time

Point = dict[str, Any]

# From few experts to many: light to dark, so that the order is seen without the legend.
COLOURS = ("#c6a15b", "#d98a4e", "#c8643f", "#a3473f", "#74304a", "#3f1f4f")
MARKERS = "osD^vP"
AT = "10"  # the accuracy that is lost first


def gain(point: Point, at: str = AT) -> float:
    """In points, over the full softmax on the same rows."""
    return 100 * (point["accuracy_at"][at] - point["full_accuracy_at"][at])


def trained(points: Iterable[Point], *, keep_one: bool) -> list[Point]:
    return [
        point for point in points if point["keep_one"] == keep_one and "impossible" not in point
    ]


def draw(results: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    counts = sorted({point["n_experts"] for point in results["points"]})
    for axes, keep_one, title in (
        (left, True, "a copy of every class"),
        (right, False, "rare classes may go"),
    ):
        _panel(axes, trained(results["points"], keep_one=keep_one), counts)
        axes.set_title(title, fontsize=10)
    left.set_ylabel(f"accuracy at {AT}, points over the full softmax")
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(counts), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axes: Axes, points: Sequence[Point], counts: Sequence[int]) -> None:
    axes.axhline(0, color="#6b6b6b", linewidth=0.8, linestyle=":")
    for place, n_experts in enumerate(counts):
        line = sorted(
            (point["flops_speedup"], gain(point))
            for point in points
            if point["n_experts"] == n_experts
        )
        axes.plot(
            [x for x, _ in line],
            [y for _, y in line],
            color=COLOURS[place % len(COLOURS)],
            marker=MARKERS[place % len(MARKERS)],
            linewidth=1.4,
            markersize=5,
            label=f"K = {n_experts}",
        )
    axes.set_xscale("log")
    axes.set_xticks(ticks := [3, 5, 10, 20, 40, 80], [f"{tick}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("fewer FLOPs than the full softmax")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def markdown(results: dict[str, Any], image: str) -> str:
    encoder = results["encoder"]
    picture = (
        f"![accuracy at {AT} against FLOPs speedup, a line for each number of experts, with and"
        f" without a copy of every class]({image})"
    )
    header = ["experts", "asked for", "keeps all", "speedup", "classes per answer"]
    header += ["copies per class", "accuracy at 1 / 5 / 10, points over full", "us a query"]
    words = (
        f"{encoder['n_classes']:,} classes, hidden size {encoder['hidden_size']};"
        f" {results['settings']['train_rows']:,} training rows, {results['settings']['epochs']}"
        " epochs a round, validation words, one seed. Times are of single rows from Python, one"
        " thread."
    )
    rows = (_row(point) for point in results["points"])
    # Not as a block to run: it takes an hour.
    how = f"{measured_on(results)} by `python -m benchmarks.training.choosing`, which says how."
    return "\n\n".join([picture, table(header, rows), f"{words} {how}"])


def _row(point: Point) -> list[str]:
    start = [
        str(point["n_experts"]),
        f"{point['speedup']:g}x",
        "yes" if point["keep_one"] else "no",
    ]
    if "impossible" in point:
        return [*start, "there is no such layer", "", "", "", ""]
    return [
        *start,
        f"{point['flops_speedup']:.1f}x",
        f"{point['mean_rows']:,.0f}",
        f"{point['mean_copies']:.2f}",
        " / ".join(f"{gain(point, at):+.2f}" for at in point["accuracy_at"]),
        time(point["microseconds"]),
    ]
