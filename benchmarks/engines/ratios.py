"""What the figures of a run say: ratios by name, and the points of a dial worth a line.

A run is what `benchmarks.engines` writes; nothing here measures.
"""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.engines.contestants import FULL, OURS, PEER

Point = dict[str, Any]
Run = dict[str, Any]

REFERENCE = "ONNX Runtime fp32"
EXACT = (REFERENCE, "torch", "numpy")
PRECISE = 0.99  # of the full softmax's first answers
LARGE = {"n_classes": 30_000, "hidden_size": 200}  # from where time shall follow FLOPs

# Name, what it divides, and the figure to reach.
AT_LEAST = {
    "full": (f"full scan, {REFERENCE} / ours, one row", 20.0),
    "peer": ("fastest peer that is no more accurate / ours, one row", 2.0),
    "precise_peer": (f"the same, of peers with precision at 1 of {PRECISE}", None),
    "time_of_flops": ("speedup in time / speedup in FLOPs, one row", 0.8),
    "batch": ("fastest full scan / ours, 256 rows", 8.0),
}
AT_MOST = {"floor": ("ours / byte floor, one row (of experts with 1,000 classes or more)", 1.5)}


def microseconds(point: Point) -> float:
    return point["one"]["mean_us"]


def microseconds_in_batch(point: Point) -> float:
    return point["many"]["mean_us"]


def fastest(points: Sequence[Point], cost: Callable[[Point], float] = microseconds) -> Point | None:
    return min(points, key=cost, default=None)


def no_better(point: Point, than: dict[str, float]) -> bool:
    """In label accuracy, wherever it is measured."""
    return all(point["accuracy"][k] <= than[k] for k in than)


def at_least_as_accurate(point: Point, as_that: dict[str, float]) -> bool:
    return all(point["accuracy"][k] >= as_that[k] for k in as_that)


def by_bundle(run: Run) -> dict[str, Point]:
    """Each bundle's fastest backend, searching one expert."""
    found: dict[str, Point] = {}
    for point in run["contestants"]:
        if point["kind"] == OURS and point["dial"]["experts"] == 1:
            best = found.setdefault(point["bundle"], point)
            if microseconds(point) < microseconds(best):
                found[point["bundle"]] = point
    return found


def ratios(run: Run) -> list[dict[str, Any]]:
    """Of every bundle; what cannot be said of it is None."""
    return [_ratios(run, point) for point in by_bundle(run).values()]


def _ratios(run: Run, point: Point) -> dict[str, Any]:
    contestants = run["contestants"]
    full = {each["name"]: each for each in contestants if each["kind"] == FULL}
    peers = [
        each for each in contestants if each["kind"] == PEER and no_better(each, point["accuracy"])
    ]
    peer = fastest(peers)
    precise = fastest([each for each in peers if each["precision"]["1"] >= PRECISE])
    exact = fastest([full[name] for name in EXACT], microseconds_in_batch)
    speedup = microseconds(full[REFERENCE]) / microseconds(point)
    large = all(run[name] >= least for name, least in LARGE.items())
    return {
        "bundle": point["bundle"],
        "ours": point["name"],
        "as_accurate_as_full": at_least_as_accurate(point, run["full_accuracy"]),
        "full": _rounded(speedup),
        "peer": _over(peer, point, microseconds),
        "peer_name": None if peer is None else peer["name"],
        "precise_peer": _over(precise, point, microseconds),
        "precise_peer_name": None if precise is None else precise["name"],
        "floor": _rounded(microseconds(point) / point["floor_us"]),
        "flops_speedup": point["flops_speedup"],
        "time_of_flops": _rounded(speedup / point["flops_speedup"]) if large else None,
        "batch": _over(exact, point, microseconds_in_batch),
        "batch_name": None if exact is None else exact["name"],
    }


def _over(one: Point | None, other: Point, cost: Callable[[Point], float]) -> float | None:
    return None if one is None else _rounded(cost(one) / cost(other))


def _rounded(ratio: float) -> float:
    return round(ratio, 3)


def worth_a_line(points: Sequence[Point]) -> list[Point]:
    """Of one method's settings: the fastest, the fastest precise one, and the most precise."""
    precise = [point for point in points if point["precision"]["1"] >= PRECISE]
    most = max(
        points,
        key=lambda point: (point["precision"]["10"], -microseconds(point)),
        default=None,
    )
    wanted = [fastest(points), fastest(precise), most]
    names = {point["name"] for point in wanted if point is not None}
    return sorted((point for point in points if point["name"] in names), key=microseconds)
