"""The pictures of accuracy against cost, one panel for each rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from trainer.report.drawing import INK, OURS, drawing, png, round_numbers
from trainer.report.format import TIMES
from trainer.report.runs import RANKS


@dataclass(frozen=True)
class Look:
    label: str
    colour: str
    marker: str
    filled: bool = True
    ours: bool = False


# Okabe and Ito's colours with three of Tol's, told apart by colour-blind readers; the markers
# differ as well. A layer of ours has one colour, its kinds different markers.
LOOKS = {
    "ds keep-one": Look("DS, keep-one", OURS, "o", ours=True),
    "ds without keep-one": Look("DS, without keep-one", OURS, "o", filled=False, ours=True),
    "ds mitosis": Look("DS, mitosis", OURS, "D", ours=True),
    "ds SVD inside": Look("DS, SVD inside", OURS, "*", ours=True),
    "screening": Look("Screening, not learned", "#E69F00", "s"),
    "svd": Look("SVD-softmax", "#0072B2", "^"),
    "fgd": Look("FGD (HNSW)", "#009E73", "v"),
    "faiss-ivf": Look("FAISS IVF", "#332288", "P"),
    "scann": Look("ScaNN", "#999933", "h"),
    "adaptive": Look("Adaptive softmax", "#CC79A7", "X"),
    "d-softmax": Look("D-softmax", "#56B4E9", "<"),
    "full-int8": Look("Full softmax, int8", "#7F7F7F", "p"),
}
FULL_LABEL, CONTROL_LABEL = "Full softmax", "Full softmax, trained on"
LOWEST_SHOWN = 0.92  # of the full softmax's accuracy; settings below are cut off


@dataclass(frozen=True)
class Measured:
    """A point of a trade-off: one setting of the method whose look is named."""

    look: str
    cost: float  # speedup or microseconds
    accuracy: dict[str, float]
    title: str = ""  # written beside it


@dataclass(frozen=True)
class Cost:
    label: str
    more_is_better: bool
    suffix: str


SPEEDUP = Cost("FLOPs speedup over the full softmax (log scale)", True, TIMES)
LATENCY = Cost("µs for one query, one thread (log scale; left is faster)", False, "")


def draw(
    points: Sequence[Measured],
    cost: Cost,
    full: dict[str, float],
    control: dict[str, float] | None,
    full_cost: float | None,
) -> bytes:
    """Accuracy at each rank, a panel each; lines join the settings that no other one beats."""
    present = [name for name in LOOKS if any(point.look == name for point in points)]
    with drawing(11.5, 4.9) as figure:
        for axes, rank in zip(figure.subplots(1, len(RANKS)), RANKS, strict=True):
            axes.axhline(full[rank], color=INK, linewidth=1.2, zorder=1)
            if full_cost is not None:
                axes.plot(full_cost, full[rank], "|", color=INK, markersize=13, mew=1.6)
            if control:
                axes.axhline(control[rank], color=INK, linewidth=1.0, linestyle=(0, (5, 3)))
            for name in reversed(present):
                _draw_method(axes, name, [p for p in points if p.look == name], cost, rank)
            _frame(axes, points, cost, rank, full, control)
        handles = [Line2D([], [], color=INK, linewidth=1.2, label=FULL_LABEL)]
        if control:
            handles.append(
                Line2D([], [], color=INK, linewidth=1, linestyle=(0, (5, 3)), label=CONTROL_LABEL)
            )
        handles += [_handle(name) for name in present]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
        return png(figure)


def _draw_method(axes: Axes, name: str, points: Sequence[Measured], cost: Cost, rank: str) -> None:
    look = LOOKS[name]
    best = frontier(points, rank, more_is_better=cost.more_is_better)
    others = [point for point in points if point not in best]
    face = look.colour if look.filled else "white"
    size = (7.5 if look.marker == "*" else 5.5) + (1 if look.ours else 0)
    axes.plot(
        [point.cost for point in others],
        [point.accuracy[rank] for point in others],
        look.marker,
        color=look.colour,
        markerfacecolor=face,
        markersize=size - 2,
        alpha=0.3,
        linestyle="none",
        zorder=2,
    )
    axes.plot(
        [point.cost for point in best],
        [point.accuracy[rank] for point in best],
        marker=look.marker,
        color=look.colour,
        markerfacecolor=face,
        markersize=size,
        markeredgewidth=1.2 if not look.filled else 0.6 if look.ours else 0,
        markeredgecolor=look.colour if not look.filled else "white",
        linewidth=1.9 if look.ours else 1.2,
        linestyle="-" if look.filled else (0, (2, 1.2)),
        zorder=4 if look.ours else 3,
    )


def _handle(name: str) -> Line2D:
    look = LOOKS[name]
    return Line2D(
        [],
        [],
        color=look.colour,
        marker=look.marker,
        markersize=8 if look.marker == "*" else 6,
        markerfacecolor=look.colour if look.filled else "white",
        linewidth=1.9 if look.ours else 1.2,
        linestyle="-" if look.filled else (0, (2, 1.2)),
        label=look.label,
    )


def frontier(points: Sequence[Measured], rank: str, *, more_is_better: bool) -> list[Measured]:
    """Those for which no other is both cheaper and at least as accurate, in order of cost."""
    sign = -1 if more_is_better else 1
    kept: list[Measured] = []
    for point in sorted(points, key=lambda p: (sign * p.cost, -p.accuracy[rank])):
        if not kept or point.accuracy[rank] > kept[-1].accuracy[rank]:
            kept.append(point)
    return sorted(kept, key=lambda p: p.cost)


def lowest_shown(full: dict[str, float], rank: str) -> float:
    return LOWEST_SHOWN * full[rank]


def _frame(
    axes: Axes,
    points: Sequence[Measured],
    cost: Cost,
    rank: str,
    full: dict[str, float],
    control: dict[str, float] | None,
) -> None:
    low = lowest_shown(full, rank)
    shown = [full[rank], *(p.accuracy[rank] for p in points if p.accuracy[rank] >= low)]
    shown += [control[rank]] if control else []
    margin = 0.06 * (max(shown) - low)
    axes.set_ylim(max(min(shown) - margin, low), max(shown) + margin)
    axes.set_title(f"Top {rank}")
    axes.set_xscale("log")
    costs = [point.cost for point in points]
    axes.set_xlim(min(costs) / 1.2, max(costs) * 1.2)
    axes.xaxis.set_major_locator(FixedLocator(round_numbers(*axes.get_xlim())))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}{cost.suffix}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.3f}"))
    axes.grid(True)
    if rank == RANKS[0]:
        axes.set_ylabel("accuracy (share of words)")
    if rank == RANKS[1]:
        axes.set_xlabel(cost.label)
