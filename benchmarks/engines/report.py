"""Tables and pictures of what `benchmarks.engines` measured, and the document that they go to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.document import table
from benchmarks.engines.contestants import APPROXIMATE, FULL, OURS, PEER
from benchmarks.engines.ratios import (
    AT_LEAST,
    AT_MOST,
    Point,
    Run,
    microseconds,
    microseconds_in_batch,
    worth_a_line,
)

COLOURS = (
    *("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#882255", "#999999", "#44AA99", "#332288", "#117733"),
)
OUR_COLOURS = ("#D55E00", "#8c3b00", "#ff9650", "#5c2a00")
MARKERS = "osD^vP*X<>"


def time(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


# --- tables ------------------------------------------------------------------------------------


def markdown(runs: dict[str, Run], images: dict[str, str]) -> str:
    """Of all runs; `images` is where each one's picture lies, seen from the document."""
    return "\n\n".join(_run(title, run, images[title]) for title, run in runs.items())


def _run(title: str, run: Run, image: str) -> str:
    parts = [
        f"### {title}",
        f"{run['n_classes']:,} classes, {run['hidden_size']} numbers in a hidden vector,"
        f" top {run['k']}, one thread. Accuracy and precision on {run['rows']:,} rows; times are"
        f" medians of {run['rounds']} rounds in which all took turns.",
        ratio_table(run),
        point_table(run),
        floor_table(run),
        f"![{title}: accuracy and precision against microseconds]({image})",
    ]
    parts += [f"Absent: {each['method']} ({each['reason']})" for each in run["absent"]]
    parts.append(machine_line(run))
    return "\n\n".join(parts)


def measured_on(run: Run) -> str:
    machine = dict(run["machine"])
    cpu, cores = machine.pop("cpu"), machine.pop("cores")
    versions = ", ".join(f"{name} {version}" for name, version in machine.items())
    return f"Measured on {cores} cores of an {cpu} with {versions}"


def machine_line(run: Run) -> str:
    return f"{measured_on(run)}:\n\n```sh\n{run['command']}\n```"


def ratio_table(run: Run) -> str:
    """Where a peer stands beside a bundle, both have their precision at 1 with them."""
    bundles = run["ratios"]
    precision = {point["name"]: point["precision"]["1"] for point in run["contestants"]}
    rows = [
        ["precision at 1 against the full softmax (a full scan: 1)", ""]
        + [f"{precision[each['ours']]:.3f}" for each in bundles],
        ["as accurate as the full softmax", ""]
        + ["yes" if each["as_accurate_as_full"] else "no" for each in bundles],
        ["speedup in FLOPs", ""] + [f"{each['flops_speedup']:.1f}x" for each in bundles],
    ]
    for sign, figures in ((">=", AT_LEAST), ("<=", AT_MOST)):
        for key, (name, target) in figures.items():
            wanted = "" if target is None else f"{sign} {target:g}"
            rows.append([name, wanted, *(_ratio(each, key, precision) for each in bundles)])
    return table(["", "to reach", *(each["ours"] for each in bundles)], rows)


def _ratio(bundle: dict[str, Any], key: str, precision: dict[str, float]) -> str:
    if bundle[key] is None:
        return "-"
    beside = bundle.get(f"{key}_name")
    if not beside:
        return f"{bundle[key]:.2f}"
    both = f"{precision[beside]:.3f} / {precision[bundle['ours']]:.3f}"
    return f"{bundle[key]:.2f} ({beside}; precision {both})"


def point_table(run: Run) -> str:
    header = ["", "accuracy at 1 / 5 / 10", "precision at 1 / 5 / 10"]
    header += ["one row: mean us", "p50", "p99", "of 256 rows: us a row"]
    return table(header, (_point(point) for point in shown(run["contestants"])))


def shown(points: Sequence[Point]) -> list[Point]:
    """Ours and full scans all; of every other method the settings that are worth a line."""
    found = [point for point in points if point["kind"] in (OURS, FULL)]
    for kind in (APPROXIMATE, PEER):
        of_kind = [point for point in points if point["kind"] == kind]
        for method in dict.fromkeys(point["method"] for point in of_kind):
            found += worth_a_line([point for point in of_kind if point["method"] == method])
    return found


def _point(point: Point) -> list[str]:
    return [
        point["name"],
        " / ".join(f"{share:.4f}" for share in point["accuracy"].values()),
        " / ".join(f"{share:.3f}" for share in point["precision"].values()),
        time(point["one"]["mean_us"]),
        time(point["one"]["p50_us"]),
        time(point["one"]["p99_us"]),
        time(point["many"]["mean_us"]),
    ]


def floor_table(run: Run) -> str:
    header = ["bundle", "stored as", "classes searched", "bytes a row", "read at"]
    header += ["byte floor", "ours", "ours / floor"]
    return table(
        header,
        (
            [
                floor["bundle"],
                floor["precision"],
                f"{floor['classes_per_row']:,.0f}",
                f"{floor['bytes_per_row']:,}",
                f"{floor['gigabytes_per_second']:.1f} GB/s",
                f"{time(floor['floor_us'])} us",
                f"{time(floor['ours_us'])} us",
                f"{floor['ratio']:.2f}",
            ]
            for floor in run["floors"]
        ),
    )


# --- pictures ----------------------------------------------------------------------------------


def draw(run: Run, path: Path) -> None:
    """Label accuracy and precision at 10 against the time of one row; left and up is better."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    for axes, (key, name) in zip(
        panels,
        (("accuracy", "label accuracy at 10"), ("precision", "precision at 10")),
        strict=True,
    ):
        _panel(axes, run, key)
        axes.set_ylabel(name)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axes: Axes, run: Run, key: str) -> None:
    points = run["contestants"]
    methods = list(dict.fromkeys(point["method"] for point in points))
    counts = {True: 0, False: 0}
    for method in methods:
        of_method = sorted((p for p in points if p["method"] == method), key=microseconds)
        mine = of_method[0]["kind"] == OURS
        colours, place = (OUR_COLOURS if mine else COLOURS), counts[mine]
        counts[mine] += 1
        colour, layer = colours[place % len(colours)], 3 if mine else 2
        axes.plot(
            [microseconds(point) for point in of_method],
            [point[key]["10"] for point in of_method],
            color=colour,
            marker=MARKERS[place % len(MARKERS)],
            linestyle="",
            markersize=6 if mine else 4,
            zorder=layer,
            label=method,
        )
        best = front(of_method, key)
        axes.plot(
            [microseconds(point) for point in best],
            [point[key]["10"] for point in best],
            color=colour,
            linestyle="-" if mine else ":",
            linewidth=1.2 if mine else 0.8,
            zorder=layer,
        )
    axes.set_xscale("log")
    axes.set_xlabel("microseconds of one row, one thread")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def front(points: Sequence[Point], key: str) -> list[Point]:
    """Of settings by rising time those that are better than all faster ones."""
    found: list[Point] = []
    for point in points:
        if not found or point[key]["10"] > found[-1][key]["10"]:
            found.append(point)
    return found


def lines(run: Run) -> str:
    """For the terminal."""
    return "\n".join(
        f"{point['name']:<40} {microseconds(point):>9.1f} us"
        f" {microseconds_in_batch(point):>9.2f} us a row of 256"
        f"  accuracy {point['accuracy']['1']:.4f}  precision {point['precision']['1']:.4f}"
        for point in sorted(run["contestants"], key=microseconds)
    )
