"""The k best classes of a list, proven: equal to scoring every class of the list in float64.

Every class has an approximate score and a bound. Of k classes the lowest `score - bound` is a
threshold that the k best exceed; classes whose `score + bound` does not reach it are left alone,
the others are candidates, and these are scored again, exactly.

B rows, T rows that are searched together, k answers, c candidates.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.engine.kernels.bounded_products import (
    CHUNK,
    QueryRows,
    add_up,
    bound,
    exact_score,
    fill_in_scores,
    reaching,
)
from service.engine.kernels.class_lists import SLACK, ClassLists
from service.engine.kernels.float_products import fetch
from service.engine.kernels.jit import Floats, Integers, ordered, reordered
from service.engine.kernels.scores import exponential

TILE = 256  # classes whose int8 rows stay in the second cache while several rows pass
ROWS_AT_ONCE = 16
CANDIDATES = 2048  # room for so many; where there are more, they are scored before the list's end
FETCHED = 4  # candidates whose rows are asked for before they are used

Doubles = NDArray[np.float64]


class Best(NamedTuple):
    """What is known about each row: exact scores, best first, ties by class."""

    classes: Integers  # [B,k]
    scores: Doubles  # [B,k]
    counts: Integers  # [B]


class Scan(NamedTuple):
    """Of T rows on their way through a list."""

    heaps: Doubles  # [T,k] the k largest lower bounds, the least first
    thresholds: Doubles  # [T] that an answer's score reaches
    places: Integers  # [T,c] candidates, by their place in the list
    scores: Doubles  # [T,c] approximate
    counts: Integers  # [T] of candidates
    sums: Doubles  # [T] of e^(score - shift), of classes that are no candidates
    shifts: Doubles  # [T] not below the threshold
    chunk: Doubles  # [CHUNK] scratch
    products: NDArray[np.int32]  # [CHUNK+3] scratch


@ordered
def make_scan(n: int, k: int, size: int) -> Scan:
    """For lists of up to `size` classes and up to n rows."""
    together = min(n, ROWS_AT_ONCE)
    room = min(max(CANDIDATES, 4 * k), size) + CHUNK
    floats = np.empty((3, together), np.float64)
    return Scan(
        np.empty((together, k), np.float64),
        floats[0],
        np.empty((together, room), np.int64),
        np.empty((together, room), np.float64),
        np.empty(together, np.int64),
        floats[1],
        floats[2],
        np.empty(CHUNK, np.float64),
        np.empty(CHUNK + 3, np.int32),
    )


# --- the best ----------------------------------------------------------------------------------


@ordered
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
def sort(scores: Doubles, places: Integers, n: int) -> None:
    """The largest score first, ties by place."""
    for at in range(n // 2 - 1, -1, -1):
        sink_last(scores, places, at, n)
    for size in range(n - 1, 0, -1):
        scores[0], scores[size] = scores[size], scores[0]
        places[0], places[size] = places[size], places[0]
        sink_last(scores, places, 0, size)


# --- sums of exponentials ----------------------------------------------------------------------


@ordered
def add_exponential(scan: Scan, t: int, score: float) -> None:
    """Of any score; the shift grows with it."""
    raise_shift(scan, t, score)
    scan.sums[t] += np.exp(score - scan.shifts[t])


@ordered
def raise_shift(scan: Scan, t: int, to: float) -> None:
    if to > scan.shifts[t]:
        scan.sums[t] *= np.exp(scan.shifts[t] - to)
        scan.shifts[t] = to


@reordered
def sum_below(scores: Doubles, n: int, shift: float) -> np.float32:
    """Of e^(score - shift), no score above the shift."""
    total = np.float32(0)
    for i in range(n):
        total += exponential(np.float32(scores[i] - shift))
    return total


# --- searching a list --------------------------------------------------------------------------


@ordered
def search_list(
    lists: ClassLists,
    which: int,
    hidden: Floats,  # [B,D]
    rows: QueryRows,
    group: Integers,  # [n] the rows to search it for
    best: Best,  # to add to
    scan: Scan,
    logsumexps: Doubles,  # [B] to fill in: those of the list's classes
) -> None:
    for first in range(0, group.shape[0], ROWS_AT_ONCE):
        some = group[first : first + ROWS_AT_ONCE]
        search_together(lists, which, hidden, rows, some, best, scan, logsumexps)


@ordered
def search_together(
    lists: ClassLists,
    which: int,
    hidden: Floats,  # [B,D]
    rows: QueryRows,
    group: Integers,  # [T]
    best: Best,
    scan: Scan,
    logsumexps: Doubles,  # [B]
) -> None:
    k = best.classes.shape[1]
    begin, stop = lists.offsets[which], lists.offsets[which + 1]
    for t in range(group.shape[0]):
        b = group[t]
        # Rows that have k answers already look for better ones.
        known = best.counts[b] == k
        scan.thresholds[t] = best.scores[b, k - 1] if known else -np.inf
        scan.heaps[t, :] = np.inf if known else -np.inf
        scan.shifts[t] = scan.thresholds[t]
        scan.counts[t], scan.sums[t] = 0, 0.0
    scattered = stop if which + 2 < lists.offsets.shape[0] else 0
    for first in range(begin, stop, TILE):
        for t in range(group.shape[0]):
            last = min(first + TILE, stop)
            scan_tile(lists, hidden, rows, group[t], t, first, last, scattered, best, scan)
    for t in range(group.shape[0]):
        score_candidates(lists, hidden[group[t]], rows, group[t], t, best, scan)
        logsumexps[group[t]] = scan.shifts[t] + np.log(scan.sums[t])


@ordered
def scan_tile(
    lists: ClassLists,
    hidden: Floats,
    rows: QueryRows,
    b: int,
    t: int,
    begin: int,
    end: int,
    stop: int,
    best: Best,
    scan: Scan,
) -> None:
    """Looks for candidates among some classes, for one row."""
    width, slack = hidden.shape[1], lists.facts[SLACK]
    room = scan.places.shape[1]
    for first in range(begin, end, CHUNK):
        last = min(first + CHUNK, end)
        add_up(lists, rows.x[b], width, first, last, stop, scan.products)
        biases = lists.biases if lists.biases.shape[0] == 0 else lists.biases[first:last]
        fill_in_scores(scan.products, lists.scales[first:last], biases, rows.steps[b], scan.chunk)
        found = reaching(
            scan.chunk,
            lists.errors[first:last],
            lists.lengths[first:last],
            rows.lengths[b],
            rows.remainders[b],
            scan.thresholds[t] - slack,
        )
        if found == 0:
            scan.sums[t] += sum_below(scan.chunk, last - first, scan.shifts[t])
            continue
        if scan.counts[t] + CHUNK > room:
            make_room(lists, hidden[b], rows, b, t, best, scan)
        for at in range(first, last):
            score = scan.chunk[at - first]
            # `bound`, whose call would pass all lists again.
            off = lists.errors[at] * rows.lengths[b] + lists.lengths[at] * rows.remainders[b]
            if score + off < scan.thresholds[t] - slack:
                scan.sums[t] += exponential(np.float32(score - scan.shifts[t]))
                continue
            scan.places[t, scan.counts[t]], scan.scores[t, scan.counts[t]] = at, score
            scan.counts[t] += 1
            if score - off - slack > scan.heaps[t, 0]:
                replace_least(scan.heaps[t], score - off - slack)
                raise_threshold(scan, t, scan.heaps[t, 0])


@ordered
def raise_threshold(scan: Scan, t: int, to: float) -> None:
    if to > scan.thresholds[t]:
        scan.thresholds[t] = to
        raise_shift(scan, t, to)


@ordered
def make_room(
    lists: ClassLists, h: Floats, rows: QueryRows, b: int, t: int, best: Best, scan: Scan
) -> None:
    """Drops candidates below the threshold, which has risen; or else scores all of them."""
    floor, kept = scan.thresholds[t] - lists.facts[SLACK], 0
    for i in range(scan.counts[t]):
        at, score = scan.places[t, i], scan.scores[t, i]
        if score + bound(lists, at, rows, b) < floor:
            add_exponential(scan, t, score)
        else:
            scan.places[t, kept], scan.scores[t, kept] = at, score
            kept += 1
    scan.counts[t] = kept
    if 2 * kept > scan.places.shape[1] - CHUNK:
        score_candidates(lists, h, rows, b, t, best, scan)


@ordered
def score_candidates(
    lists: ClassLists, h: Floats, rows: QueryRows, b: int, t: int, best: Best, scan: Scan
) -> None:
    """The best by approximate score first, so that most of the others are found to be too low."""
    n, k, slack = scan.counts[t], best.classes.shape[1], lists.facts[SLACK]
    scores, places, width = scan.scores[t], scan.places[t], h.shape[0]
    sort(scores, places, n)
    for i in range(min(n, FETCHED)):
        fetch(lists.weights, np.int64(lists.classes[places[i]]) * width, width)
    for i in range(n):
        at = places[i]
        if i + FETCHED < n and i < k:
            fetch(lists.weights, np.int64(lists.classes[places[i + FETCHED]]) * width, width)
        score = scores[i]
        if best.counts[b] < k or score + bound(lists, at, rows, b) >= best.scores[b, k - 1] - slack:
            c = int(lists.classes[at])
            score = exact_score(lists, h, c)
            keep(best, b, score, c)
        add_exponential(scan, t, score)
    scan.counts[t] = 0
    if best.counts[b] == k:
        raise_threshold(scan, t, best.scores[b, k - 1])
