"""The k best classes of a list, proven: equal to scoring every class of the list in float64.

Every class has an approximate score and a bound. Of k classes the lowest `score - bound` is a
threshold that the k best exceed; classes whose `score + bound` does not reach it are left alone,
the others are candidates, and these are scored again, exactly.

B rows, T rows that are searched together, k answers, c candidates.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.engine.kernels.best import Best, keep, order, replace_least
from service.engine.kernels.bounded_products import (
    Doubles,
    QueryRows,
    bound,
    exact_score,
    fill_in_scores,
    mark_reaching,
    reaching,
    sum_below,
    sum_marked,
)
from service.engine.kernels.class_lists import SLACK, ClassLists
from service.engine.kernels.float_products import fetch
from service.engine.kernels.int16_intrinsics import EIGHT
from service.engine.kernels.int16_products import add_up, way_for
from service.engine.kernels.jit import Floats, Integers, ordered

CHUNK = 128  # classes whose scores are looked at together
TILE = 256  # classes whose int8 rows stay in the second cache while several rows pass
ROWS_AT_ONCE = 16
CANDIDATES = 2048  # room for so many; where there are more, they are scored before the list's end
FETCHED = 8  # candidates whose rows are asked for before they are used


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
    products: NDArray[np.int32]  # [CHUNK+EIGHT] scratch
    marks: NDArray[np.uint8]  # [CHUNK] scratch


@ordered
def make_scan(n: int, k: int, size: int) -> Scan:
    """For lists of up to `size` classes and up to n rows."""
    together = min(n, ROWS_AT_ONCE)
    room = min(max(CANDIDATES, 4 * k), size) + CHUNK
    # Allocations are a good part of a small call, so there are few.
    floats = np.empty(together * (k + room + 3) + CHUNK, np.float64)
    integers = np.empty(together * (room + 1), np.int64)
    small = np.empty(CHUNK + EIGHT + CHUNK // 4, np.int32)
    begin = together * 3
    heaps = floats[begin : begin + together * k].reshape((together, k))
    begin += together * k
    scores = floats[begin : begin + together * room].reshape((together, room))
    begin += together * room
    return Scan(
        heaps=heaps,
        thresholds=floats[:together],
        places=integers[: together * room].reshape((together, room)),
        scores=scores,
        counts=integers[together * room :],
        sums=floats[together : 2 * together],
        shifts=floats[2 * together : 3 * together],
        chunk=floats[begin:],
        products=small[: CHUNK + EIGHT],
        marks=small[CHUNK + EIGHT :].view(np.uint8),
    )


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
        scan.thresholds[t] = best.scores[b, k - 1] if best.counts[b] == k else -np.inf
        scan.heaps[t, :] = -np.inf
        scan.shifts[t] = scan.thresholds[t]
        scan.counts[t], scan.sums[t] = 0, 0.0
    tile = TILE if group.shape[0] > 1 else stop - begin
    for first in range(begin, stop, tile):
        last = min(first + tile, stop)
        for t in range(group.shape[0]):
            find_candidates(lists, hidden, rows, group[t], t, first, last, stop, best, scan)
    for t in range(group.shape[0]):
        score_candidates(lists, hidden[group[t]], rows, group[t], t, best, scan)
        logsumexps[group[t]] = scan.shifts[t] + np.log(scan.sums[t])


@ordered
def find_candidates(
    lists: ClassLists,
    hidden: Floats,  # [B,D]
    rows: QueryRows,
    b: int,
    t: int,
    begin: int,  # in the lists
    end: int,
    stop: int,  # where the list ends
    best: Best,
    scan: Scan,
) -> None:
    """Looks for them among some classes, for one row."""
    width, slack = hidden.shape[1], lists.facts[SLACK]
    x, step, length, remainder = rows.x[b], rows.steps[b], rows.lengths[b], rows.remainders[b]
    chunk, products, marks, heap = scan.chunk, scan.products, scan.marks, scan.heaps[t]
    places, scores, way = scan.places[t], scan.scores[t], way_for(width)
    for first in range(begin, end, CHUNK):
        last = min(first + CHUNK, end)
        n = last - first
        add_up(x, way, lists.quantised, lists.classes[first:stop], n, width, products)
        biases = lists.biases if lists.biases.shape[0] == 0 else lists.biases[first:last]
        fill_in_scores(products, lists.scales[first:last], biases, step, chunk)
        errors, lengths = lists.errors[first:last], lists.lengths[first:last]
        floor = scan.thresholds[t] - slack
        if reaching(chunk, errors, lengths, length, remainder, floor) == 0:
            scan.sums[t] += sum_below(chunk, n, scan.shifts[t])
            continue
        raised = raise_least(heap, chunk, errors, lengths, length, remainder, slack, floor + slack)
        raise_threshold(scan, t, raised)
        if scan.counts[t] + CHUNK > places.shape[0]:
            make_room(lists, hidden[b], rows, b, t, best, scan)
        mark_reaching(
            chunk, errors, lengths, length, remainder, scan.thresholds[t] - slack, marks
        )
        scan.sums[t] += sum_marked(chunk, marks, n, scan.shifts[t])
        count = scan.counts[t]
        for i in range(n):
            if marks[i]:
                places[count], scores[count] = first + i, chunk[i]
                count += 1
        scan.counts[t] = count


@ordered
def raise_least(
    heap: Doubles,
    scores: Doubles,
    errors: Floats,
    lengths: Floats,
    length: float,
    remainder: float,
    slack: float,
    threshold: float,
) -> float:
    """Puts what some classes' scores are at least into the heap, and returns its least."""
    for i in range(errors.shape[0]):
        low = scores[i] - (errors[i] * length + lengths[i] * remainder) - slack
        if low > threshold:
            replace_least(heap, low)
            threshold = max(threshold, heap[0])
    return heap[0]


@ordered
def raise_shift(scan: Scan, t: int, to: float) -> None:
    if to > scan.shifts[t]:
        scan.sums[t] *= np.exp(scan.shifts[t] - to)
        scan.shifts[t] = to


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
        if score + bound(lists, at, rows.lengths[b], rows.remainders[b]) < floor:
            scan.sums[t] += np.exp(score - scan.shifts[t])
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
    length, remainder = rows.lengths[b], rows.remainders[b]
    order(scores, places, n)
    for i in range(min(n, FETCHED)):
        fetch(lists.weights, np.int64(lists.classes[places[i]]) * width, width)
    top = scan.shifts[t]
    for i in range(n):
        at = places[i]
        if i + FETCHED < n and i < k:
            fetch(lists.weights, np.int64(lists.classes[places[i + FETCHED]]) * width, width)
        known = best.counts[b] == k
        off = bound(lists, at, length, remainder)
        if not known or scores[i] + off >= best.scores[b, k - 1] - slack:
            c = int(lists.classes[at])
            scores[i] = exact_score(lists, h, c)
            keep(best, b, scores[i], c)
        top = max(top, scores[i])
    if n > 0:
        raise_shift(scan, t, top)
        scan.sums[t] += sum_below(scores, n, scan.shifts[t])
    scan.counts[t] = 0
    if best.counts[b] == k:
        raise_threshold(scan, t, best.scores[b, k - 1])
