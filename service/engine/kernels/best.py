"""The best of many, by float64 scores: an ordered list, a heap, a sort.

B rows, k answers.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.engine.kernels.jit import Integers, forced, ordered

Doubles = NDArray[np.float64]

SORTED_BY_INSERTION = 32  # up to so many


class Best(NamedTuple):
    """What is known about each row: exact scores, best first, ties by class."""

    classes: Integers  # [B,k]
    scores: Doubles  # [B,k]
    counts: Integers  # [B]


@forced
def keep(best: Best, b: int, score: float, c: int) -> None:
    """Puts a class among the best of a row, if it belongs there and is not there already."""
    classes, scores, k = best.classes[b], best.scores[b], best.classes.shape[1]
    count = best.counts[b]
    at = count
    while at > 0 and (scores[at - 1] < score or (scores[at - 1] == score and classes[at - 1] > c)):
        at -= 1
    if at == k or (at > 0 and scores[at - 1] == score and classes[at - 1] == c):
        return
    last = min(count, k - 1)
    for i in range(last, at, -1):
        scores[i], classes[i] = scores[i - 1], classes[i - 1]
    scores[at], classes[at] = score, c
    best.counts[b] = min(count + 1, k)


@ordered
def replace_least(heap: Doubles, value: float) -> None:
    """The least of a heap, which is its first one, by a larger one."""
    n, at = heap.shape[0], 0
    while 2 * at + 1 < n:
        child = 2 * at + 1
        if child + 1 < n and heap[child + 1] < heap[child]:
            child += 1
        if value <= heap[child]:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = value


@ordered
def is_before(scores: Doubles, places: Integers, i: int, j: int) -> bool:
    return bool(scores[i] > scores[j] or (scores[i] == scores[j] and places[i] < places[j]))


@ordered
def sink_last(scores: Doubles, places: Integers, at: int, n: int) -> None:
    """Puts a heap in order from `at` on, whose first one comes last."""
    while 2 * at + 1 < n:
        child = 2 * at + 1
        if child + 1 < n and is_before(scores, places, child, child + 1):
            child += 1
        if not is_before(scores, places, at, child):
            break
        scores[at], scores[child] = scores[child], scores[at]
        places[at], places[child] = places[child], places[at]
        at = child


@ordered
def order(scores: Doubles, places: Integers, n: int) -> None:
    """The largest score first, ties by place."""
    if n <= SORTED_BY_INSERTION:
        for i in range(1, n):
            score, place, at = scores[i], places[i], i
            while at > 0 and (
                scores[at - 1] < score or (scores[at - 1] == score and places[at - 1] > place)
            ):
                scores[at], places[at] = scores[at - 1], places[at - 1]
                at -= 1
            scores[at], places[at] = score, place
        return
    for at in range(n // 2 - 1, -1, -1):
        sink_last(scores, places, at, n)
    for size in range(n - 1, 0, -1):
        scores[0], scores[size] = scores[size], scores[0]
        places[0], places[size] = places[size], places[0]
        sink_last(scores, places, 0, size)
