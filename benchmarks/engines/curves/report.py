"""Tables and pictures of what `benchmarks.engines.curves` measured."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.document import table
from benchmarks.engines.contestants import OURS
from benchmarks.engines.report import COLOURS, MARKERS, OUR_COLOURS, machine_line, time

Point = dict[str, Any]
Run = dict[str, Any]

LEVELS = (0.9, 0.95, 0.99, 0.999)
TICKS = (0.5, 0.9, 0.99, 0.999, 0.9999)
FINEST = 1e-5  # a recall nearer to 1 than this is drawn at the edge


def microseconds(point: Point) -> float:
    return point["mean_us"]


def fastest_at(points: Iterable[Point], recall: float) -> Point | None:
    """The fastest whose recall is at least that."""
    return min((p for p in points if p["recall"] >= recall), key=microseconds, default=None)


def ratios(run: Run) -> list[dict[str, Any]]:
    """For every k and recall: ours, the fastest other one, and how many times its time is ours."""
    found = []
    for k in dict.fromkeys(point["k"] for point in run["points"]):
        points = [point for point in run["points"] if point["k"] == k]
        for level in LEVELS:
            ours = fastest_at((p for p in points if p["kind"] == OURS), level)
            peer = fastest_at((p for p in points if p["kind"] != OURS), level)
            ratio = (
                None if ours is None or peer is None else microseconds(peer) / microseconds(ours)
            )
            found.append({"k": k, "recall": level, "ours": ours, "peer": peer, "ratio": ratio})
    return found


def front(points: Sequence[Point]) -> list[Point]:
    """By rising time those whose recall is above that of all faster ones."""
    found: list[Point] = []
    for point in sorted(points, key=microseconds):
        if not found or point["recall"] > found[-1]["recall"]:
            found.append(point)
    return found


# --- tables ------------------------------------------------------------------------------------


def markdown(runs: dict[str, Run], images: dict[str, str]) -> str:
    return "\n\n".join(_run(title, run, images[title]) for title, run in runs.items())


def _run(title: str, run: Run, image: str) -> str:
    tried = sum(run["tried"].values())
    parts = [
        f"### {title}",
        f"{run['n_classes']:,} classes, {run['hidden_size']} numbers in a hidden vector, one row a"
        f" call, one thread. Recall on {run['rows']:,} held-out rows; times are medians of"
        f" {run['rounds']} rounds in which all took turns. Of {tried:,} settings of others a first"
        f" pass left {sum(point['kind'] != OURS for point in run['points']):,}.",
        *tables(run),
        f"![{title}: queries a second against recall]({image})",
    ]
    parts += [f"Absent: {each['method']} ({each['reason']})" for each in run["absent"]]
    parts.append(machine_line(run))
    return "\n\n".join(parts)


def tables(run: Run) -> list[str]:
    return [ratio_table(run), *method_tables(run)]


def ratio_table(run: Run) -> str:
    header = ["top", "recall >=", "time of the fastest other / ours", "ours: us (p50), recall"]
    header += ["fastest other: us (p50), recall"]
    return table(
        header,
        (
            [
                str(each["k"]),
                f"{each['recall']:g}",
                "-" if each["ratio"] is None else f"{each['ratio']:.2f}",
                _point(each["ours"]),
                _point(each["peer"]),
            ]
            for each in ratios(run)
        ),
    )


def method_tables(run: Run) -> list[str]:
    """For every k the time of each method's fastest setting that reaches a recall."""
    methods = list(dict.fromkeys(point["method"] for point in run["points"]))
    found = []
    for k in dict.fromkeys(point["k"] for point in run["points"]):
        header = [f"us, top {k}", *(f"recall >= {level:g}" for level in LEVELS)]
        rows = []
        for method in methods:
            own = [p for p in run["points"] if p["method"] == method and p["k"] == k]
            best = [fastest_at(own, level) for level in LEVELS]
            rows.append([method, *("-" if p is None else time(microseconds(p)) for p in best)])
        found.append(table(header, rows))
    return found


def _point(point: Point | None) -> str:
    if point is None:
        return "none"
    times = f"{time(point['mean_us'])} ({time(point['p50_us'])})"
    return f"{point['name']}: {times}, {point['recall']:.4f}"


# --- the picture -------------------------------------------------------------------------------


def draw(run: Run, path: Path) -> None:
    """A panel for every k: right and up is better."""
    ks = list(dict.fromkeys(point["k"] for point in run["points"]))
    figure = Figure(figsize=(5 * len(ks) + 2, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(ks), squeeze=False)[0]
    looks = _looks(run["points"])
    for axes, k in zip(panels, ks, strict=True):
        _panel(axes, [point for point in run["points"] if point["k"] == k], looks)
        axes.set_xlabel(f"recall at {k}")
    panels[0].set_ylabel("queries a second, one thread")
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="outside right upper", frameon=False, fontsize=8
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _looks(points: Sequence[Point]) -> dict[str, tuple[bool, str, str]]:
    """Each method's kind, colour and marker, the same in all panels."""
    counts = {True: 0, False: 0}
    found = {}
    for point in points:
        if point["method"] not in found:
            mine = point["kind"] == OURS
            colours, place = (OUR_COLOURS if mine else COLOURS), counts[mine]
            counts[mine] += 1
            marker = MARKERS[place % len(MARKERS)]
            found[point["method"]] = (mine, colours[place % len(colours)], marker)
    return found


def _panel(axes: Axes, points: Sequence[Point], looks: dict[str, tuple[bool, str, str]]) -> None:
    for method, (mine, colour, marker) in looks.items():
        best = front([point for point in points if point["method"] == method])
        if not best:
            continue
        axes.plot(
            [_place(point["recall"]) for point in best],
            [1e6 / microseconds(point) for point in best],
            color=colour,
            marker=marker,
            linestyle="-" if mine else ":",
            linewidth=1.4 if mine else 0.9,
            markersize=6 if mine else 4,
            zorder=3 if mine else 2,
            label=method,
        )
    axes.set_yscale("log")
    axes.set_xticks([*map(_place, TICKS), _place(1.0)], [*map(str, TICKS), "1"])
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _place(recall: float) -> float:
    """0.9, 0.99 and 0.999 lie at equal distances."""
    return float(-np.log10(max(1 - recall, FINEST)))
