"""The pictures of one layer: its experts, its classes, and its memory while it was trained.

K experts, N classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from matplotlib.colors import LogNorm, PowerNorm
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter
from numpy.typing import NDArray

from trainer.report.drawing import FAINT, INK, OURS, drawing, png, round_numbers
from trainer.report.runs import LayerFacts, MemoryPoint

FIRST_CLASSES = 200  # shown one by one
COLUMNS = 400  # the others are shown in as many bins at most


def memory_curve(memory: Sequence[MemoryPoint], published_peak: float | None) -> bytes:
    """Parameters in memory while the experts double, in full softmaxes: a column for each stage."""
    stages = [list(points) for _, points in groupby(memory, key=lambda point: point.experts)]
    places = [
        number + step / len(points)
        for number, points in enumerate(stages)
        for step in range(len(points))
    ]
    values = [point.memory for point in memory]
    peak = values.index(max(values))
    end = len(stages)
    with drawing(8.5, 3.8) as figure:
        axes = figure.add_subplot()
        outline = [*places, end], [*values, values[-1]]
        axes.plot(*outline, color=OURS, linewidth=1.8, drawstyle="steps-post")
        axes.fill_between(*outline, color=OURS, alpha=0.12, linewidth=0, step="post")
        for number in range(1, end):
            axes.axvline(number, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.plot(places[peak], values[peak], "o", color=OURS, markersize=5, clip_on=False)
        axes.annotate(
            f"peak {values[peak]:.2f}",
            (places[peak], values[peak]),
            xytext=(6, 5),
            textcoords="offset points",
            color=OURS,
            fontweight="bold",
        )
        axes.axhline(1, color=INK, linewidth=1)
        axes.annotate(
            "one full softmax",
            (end, 1),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color=INK,
        )
        if published_peak:
            axes.axhline(published_peak, color=FAINT, linewidth=1, linestyle=(0, (5, 3)))
            axes.annotate(
                f"the paper's peak, {published_peak:g}",
                (end, published_peak),
                xytext=(0, 3),
                textcoords="offset points",
                ha="right",
                color=FAINT,
            )
        axes.set_ylim(0, 1.12 * max(values + ([published_peak] if published_peak else [])))
        axes.set_xlim(0, end)
        axes.set_xticks(
            [number + 0.5 for number in range(end)],
            [f"{points[0].experts} experts" for points in stages],
        )
        axes.tick_params(axis="x", length=0)
        axes.set_xlabel("while it trains; at each dotted line every expert splits in two")
        axes.set_ylabel("parameters in memory,\nin full softmaxes")
        return png(figure)


def expert_matrix(layer: LayerFacts) -> bytes:
    """Expert x class. Frequent classes come first and are also shown one by one."""
    n_experts, n_classes = layer.held.shape
    ranked = layer.frequencies is not None
    held = layer.held[expert_order(layer)][:, class_order(layer)].astype(float)
    height = float(np.clip(0.07 * n_experts, 2.6, 5.6))
    with drawing(11.5, height + 0.9) as figure:
        if ranked and n_classes > COLUMNS:
            left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 2))
            first = held[:, :FIRST_CLASSES]
            left.imshow(first, cmap="Greys", aspect="auto", interpolation="nearest", vmin=0, vmax=1)
            left.set_title(f"The {FIRST_CLASSES} most frequent, one by one")
            left.set_xlabel("class, most frequent first")
        else:
            left = right = figure.add_subplot()
        width = int(np.ceil(n_classes / COLUMNS))
        starts = np.arange(0, n_classes, width)
        counts = np.diff([*starts, n_classes])
        shares = np.add.reduceat(held, starts, axis=1) / counts  # [K,bins]
        image = right.imshow(
            shares,
            cmap="Greys",
            aspect="auto",
            interpolation="nearest",
            norm=PowerNorm(0.5, 0, 1),
            extent=(0, n_classes, n_experts - 0.5, -0.5),
        )
        right.set_title(f"All {n_classes:,}" + (f", {width} to a column" if width > 1 else ""))
        right.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        right.set_xlabel("class, most frequent first" if ranked else "class, by number")
        if width > 1:
            bar = figure.colorbar(image, ax=right, pad=0.01, ticks=[0, 0.04, 0.16, 0.36, 0.64, 1])
            bar.ax.yaxis.set_major_formatter(PercentFormatter(1, 0))
            bar.outline.set_visible(False)
            bar.set_label("share of the column's classes held")
        left.set_ylabel("expert, largest first" if ranked else "expert, by its mean class")
        return png(figure)


def class_order(layer: LayerFacts) -> NDArray[np.int64]:
    if layer.frequencies is None:
        return np.arange(layer.held.shape[1])
    return np.argsort(-layer.frequencies, kind="stable")


def expert_order(layer: LayerFacts) -> NDArray[np.int64]:
    """Large ones first; where class numbers are all there is, in their order."""
    if layer.frequencies is not None:
        return np.argsort(-layer.sizes, kind="stable")
    numbers = layer.held @ np.arange(layer.held.shape[1])
    return np.argsort(numbers / np.maximum(layer.sizes, 1), kind="stable")


def utilization_bars(layer: LayerFacts) -> bytes:
    """Upwards how often each expert is chosen, downwards how many classes it then scores."""
    order = np.argsort(-layer.utilization, kind="stable")
    used, sizes = layer.utilization[order], layer.sizes[order]
    places = np.arange(len(order))
    with drawing(11.5, 4.2) as figure:
        above, below = figure.subplots(2, 1, sharex=True)
        small = {"fontsize": 9, "fontweight": "normal"}
        above.bar(places, used, width=0.8, color=OURS)
        above.axhline(1 / len(order), color=INK, linewidth=1, linestyle=(0, (5, 3)))
        above.set_title(f"dashed: even load, {1 / len(order):.1%}", loc="right", **small)
        above.yaxis.set_major_formatter(PercentFormatter(1, None))
        above.set_ylabel("share of rows\nthat come here")
        mean = float(used @ sizes)
        below.bar(places, sizes, width=0.8, color="#0072B2")
        below.axhline(mean, color=INK, linewidth=1, linestyle=(0, (5, 3)))
        if sizes.max() > 20 * max(1, np.median(sizes)):  # one bar would hide the others
            below.set_yscale("log")
            below.set_ylim(0.8, 1.5 * sizes.max())
            below.yaxis.set_minor_locator(NullLocator())
        below.invert_yaxis()
        below.spines.bottom.set_visible(False)
        below.spines.top.set_visible(True)
        below.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
        log = "\n(log scale)" if below.get_yscale() == "log" else ""
        below.set_ylabel(f"classes\nit holds{log}")
        below.set_xlabel(
            f"expert, most used first (dashed: the mean over rows, {mean:,.1f} classes)"
        )
        below.tick_params(axis="x", bottom=False, labelbottom=False)
        above.tick_params(axis="x", bottom=False)
        above.set_xlim(-0.7, len(order) - 0.3)
        for axes in (above, below):
            axes.grid(True, axis="y")
        return png(figure)


@dataclass(frozen=True)
class Redundancy:
    """Words counted by frequency and by the number of experts that hold them."""

    frequency_edges: NDArray[np.float64]
    copies_edges: NDArray[np.float64]
    words: NDArray[np.int64]  # [frequency bins, copies bins]
    mean_copies: NDArray[np.float64]  # [frequency bins], NaN where there is no word


def redundancy(frequencies: NDArray[np.int64], copies: NDArray[np.int64]) -> Redundancy:
    """Of words that occur and are held: a log axis has no zero."""
    shown = (frequencies > 0) & (copies > 0)
    frequencies, copies = frequencies[shown], copies[shown]
    across, up = _log_edges(frequencies, 36), _log_edges(copies, 16)
    words, _, _ = np.histogram2d(frequencies, copies, bins=[across, up])
    found = words.sum(1)
    total, _ = np.histogram(frequencies, bins=across, weights=copies)
    mean = np.divide(total, found, out=np.full(len(found), np.nan), where=found > 0)
    return Redundancy(across, up, words.astype(np.int64), mean)


def _log_edges(values: NDArray[np.int64], n_bins: int) -> NDArray[np.float64]:
    """Edges between whole numbers, evenly spread in the logarithm where numbers are dense."""
    most = int(values.max(initial=1))
    return np.unique(np.round(np.geomspace(1, most + 1, n_bins + 1))) - 0.5


def redundancy_map(counted: Redundancy) -> bytes:
    with drawing(6.6, 4.6) as figure:
        axes = figure.add_subplot()
        image = axes.pcolormesh(
            counted.frequency_edges,
            counted.copies_edges,
            np.ma.masked_equal(counted.words.T, 0),
            cmap="Blues",
            norm=LogNorm(0.5, max(2, counted.words.max(initial=1))),  # one word is not white
        )
        centres = np.sqrt(counted.frequency_edges[:-1] * counted.frequency_edges[1:])
        axes.plot(centres, counted.mean_copies, color=OURS, linewidth=1.8, label="mean")
        axes.legend(loc="upper left")
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis, edges in (
            (axes.xaxis, counted.frequency_edges),
            (axes.yaxis, counted.copies_edges),
        ):
            axis.set_major_locator(FixedLocator(round_numbers(1, edges[-1])))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
        axes.set_xlabel("times the word occurs in the training text (log scale)")
        axes.set_ylabel("experts that hold it (log scale)")
        bar = figure.colorbar(image, ax=axes, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
        bar.set_label("words (log scale)")
        return png(figure)
