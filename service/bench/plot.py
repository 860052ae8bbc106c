"""Measured points as a picture: latency and throughput against what was swept."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from service.bench.report import ReportNotWritten

Points = Sequence[Mapping[str, Any]]
INCHES = (10, 4.2)


def engine(points: Points, path: Path) -> None:
    lines = ("backend", "threads", "k", "experts")
    _draw(points, path, "batch", "rows in a call", lines, "rows_per_second", "rows/s")


def http(points: Points, path: Path) -> None:
    lines = ("batch",)
    _draw(points, path, "concurrency", "connections", lines, "requests_per_second", "requests/s")


def _draw(
    points: Points,
    path: Path,
    x: str,
    x_label: str,
    lines: Sequence[str],
    throughput: str,
    throughput_label: str,
) -> None:
    figure = Figure(INCHES, layout="constrained")
    left, right = figure.subplots(1, 2)
    for color, (name, of_line) in enumerate(_grouped(points, lines).items()):
        of_line = sorted(of_line, key=lambda point: point[x])
        across = [point[x] for point in of_line]
        for field, style in (("p50_us", "-"), ("p99_us", ":")):
            label = f"{name}, {field[:3]}".lstrip(", ")
            values = [point[field] for point in of_line]
            left.plot(across, values, style, marker="o", color=f"C{color}", label=label)
        values = [point[throughput] for point in of_line]
        right.plot(across, values, marker="o", color=f"C{color}", label=name or None)
    _label(left, x_label, "microseconds", points, x)
    _label(right, x_label, throughput_label, points, x)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ReportNotWritten(f"{path} cannot be written.") from error


def _grouped(points: Points, fields: Sequence[str]) -> dict[str, list[Mapping[str, Any]]]:
    """Points that make one line, by what tells it from the others."""
    telling = [field for field in fields if len({point[field] for point in points}) > 1]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for point in points:
        groups.setdefault(", ".join(f"{f} {point[f]}" for f in telling), []).append(point)
    return groups


def _label(axes: Axes, x_label: str, y_label: str, points: Points, x: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({point[x] for point in points})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
