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
from service.engine.kernels.borrowed import words
from service.engine.kernels.class_lists import SLACK, ClassLists
from service.engine.kernels.jit import Floats, Integers, forced, ordered
from service.engine.kernels.products.bounded_products import (
    Bounds,
    Doubles,
    QueryRows,
    bound,
    bounds_of,
    exact_score,
    mark,
    score_and_mark,
    score_with_bias,
    sum_below,
    sum_unmarked,
)
from service.engine.kernels.products.float_products import fetch
from service.engine.kernels.products.int16_intrinsics import EIGHT
from service.engine.kernels.products.int16_products import add_up, way_for
from service.engine.kernels.scores import exponential
from service.engine.kernels.small_lists import SMALL, is_small, search_small

CHUNK = 256  # classes whose scores are looked at together
MANY = 16  # marked ones, of which most may be ruled out by a threshold that they raise
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
    chunk: Doubles  # [SMALL] scratch
    products: NDArray[np.int32]  # [SMALL+EIGHT] scratch
    marks: NDArray[np.uint8]  # [CHUNK] scratch


@ordered
def room_for(k: int, size: int) -> int:
    """Of candidates, in lists of up to `size` classes."""
    return min(max(CANDIDATES, 4 * k), size) + CHUNK


@ordered
def scan_words(n: int, k: int, size: int) -> int:
    """How many words `make_scan` needs, for up to n rows."""
    return min(n, ROWS_AT_ONCE) * (k + 2 * room_for(k, size) + 4) + 2 * SMALL + CHUNK


@ordered
def make_scan(space: Doubles, n: int, k: int, size: int) -> Scan:
    together, room = min(n, ROWS_AT_ONCE), room_for(k, size)
    each, cells = together * room, together * k
    after = 4 * together
    heaps = space[after : after + cells].reshape((together, k))
    after += cells
    scores = space[after : after + each].reshape((together, room))
    after += each
    places = words(space, after, each).reshape((together, room))
    after += each
    small = space[after + SMALL :].view(np.int32)
    return Scan(
        heaps=heaps,
        thresholds=space[:together],
        places=places,
        scores=scores,
        counts=words(space, 3 * together, together),
        sums=space[together : 2 * together],
        shifts=space[2 * together : 3 * together],
        chunk=space[after : after + SMALL],
        products=small[: SMALL + EIGHT],
        marks=small[SMALL + EIGHT : SMALL + EIGHT + CHUNK // 4].view(np.uint8),
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
    if is_small(lists.offsets[which + 1] - lists.offsets[which], hidden.shape[1]):
        scores, lows = scan.scores[0], scan.places[0].view(np.float64)
        for b in group:
            logsumexps[b] = search_small(
                lists, which, hidden[b], rows, b, best, scan.products, scores, lows, scan.chunk
            )
        return
    for first in range(0, group.shape[0], ROWS_AT_ONCE):
        some = group[first : first + ROWS_AT_ONCE]
        search_together(lists, which, hidden, rows, some, best, scan, logsumexps)


@forced
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


@forced
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
    width, slack, biased = hidden.shape[1], lists.facts[SLACK], lists.biases.shape[0] > 0
    x, row, way = rows.x[b], bounds_of(rows, b), way_for(width)
    all_classes = stop == lists.offsets[lists.offsets.shape[0] - 1]
    chunk, products, marks = scan.chunk, scan.products, scan.marks
    for first in range(begin, end, CHUNK):
        last = min(first + CHUNK, end)
        n = last - first
        classes = lists.classes[first:stop]
        add_up(x, way, lists.quantised, classes, n, width, all_classes, products)
        scales, errors = lists.scales[first:last], lists.errors[first:last]
        lengths, floor = lists.lengths[first:last], scan.thresholds[t] - slack
        if biased:
            score_with_bias(products, scales, lists.biases[first:last], row, chunk)
            marked = mark(chunk, errors, lengths, row, floor, marks)
        else:
            marked = score_and_mark(products, scales, errors, lengths, row, floor, chunk, marks)
        if marked == 0:
            scan.sums[t] += sum_below(chunk, n, scan.shifts[t])
            continue
        raise_by(chunk, errors, lengths, row, slack, n, scan, t)
        if marked > MANY:
            mark(chunk, errors, lengths, row, scan.thresholds[t] - slack, marks)
        scan.sums[t] += sum_unmarked(chunk, marks, n, scan.shifts[t])
        if scan.counts[t] + CHUNK > scan.places.shape[1]:
            make_room(lists, hidden[b], rows, b, t, best, scan)
        add_marked(first, n, scan, t)


@forced
def raise_by(
    scores: Doubles,
    errors: Floats,
    lengths: Floats,
    row: Bounds,
    slack: float,
    n: int,
    scan: Scan,
    t: int,
) -> None:
    """Raises the threshold to what k of the classes so far are at least, if these are above it.

    Only marked ones can be.
    """
    marks, heap = scan.marks.view(np.uint64), scan.heaps[t]
    threshold = max(scan.thresholds[t], heap[0])
    for eight in range(0, n, 8):
        if marks[eight // 8] == 0:
            continue
        for i in range(eight, min(eight + 8, n)):
            low = scores[i] - (errors[i] * row.length + lengths[i] * row.remainder) - slack
            if low > threshold:
                replace_least(heap, low)
                threshold = max(threshold, heap[0])
    raise_threshold(scan, t, heap[0])


@forced
def add_marked(first: int, n: int, scan: Scan, t: int) -> None:
    """To the candidates."""
    marks, words = scan.marks, scan.marks.view(np.uint64)
    places, scores, count = scan.places[t], scan.scores[t], scan.counts[t]
    for eight in range(0, n, 8):
        if words[eight // 8] == 0:
            continue
        for i in range(eight, min(eight + 8, n)):
            # Written in any case, and kept if it is marked: there is no pattern to predict.
            places[count], scores[count] = first + i, scan.chunk[i]
            count += marks[i]
    scan.counts[t] = count


@forced
def raise_shift(scan: Scan, t: int, to: float) -> None:
    if to > scan.shifts[t]:
        scan.sums[t] *= np.exp(scan.shifts[t] - to)
        scan.shifts[t] = to


@forced
def raise_threshold(scan: Scan, t: int, to: float) -> None:
    if to > scan.thresholds[t]:
        scan.thresholds[t] = to
        raise_shift(scan, t, to)


@forced
def drop_candidates(lists: ClassLists, row: Bounds, scan: Scan, t: int) -> None:
    """Those that the threshold, which has risen, rules out."""
    places, scores, floor = scan.places[t], scan.scores[t], scan.thresholds[t] - lists.facts[SLACK]
    kept = 0
    for i in range(scan.counts[t]):
        at, score = places[i], scores[i]
        if score + bound(lists, at, row) < floor:
            scan.sums[t] += exponential(np.float32(score - scan.shifts[t]))
        else:
            places[kept], scores[kept] = at, score
            kept += 1
    scan.counts[t] = kept


@ordered
def make_room(
    lists: ClassLists, h: Floats, rows: QueryRows, b: int, t: int, best: Best, scan: Scan
) -> None:
    """Drops candidates; if many are left, scores them."""
    drop_candidates(lists, bounds_of(rows, b), scan, t)
    if 2 * scan.counts[t] > scan.places.shape[1] - CHUNK:
        score_candidates(lists, h, rows, b, t, best, scan)


@forced
def score_candidates(
    lists: ClassLists, h: Floats, rows: QueryRows, b: int, t: int, best: Best, scan: Scan
) -> None:
    """The best by approximate score first, so that most of the others are found to be too low."""
    row = bounds_of(rows, b)
    drop_candidates(lists, row, scan, t)
    n, k, slack = scan.counts[t], best.classes.shape[1], lists.facts[SLACK]
    scores, places, width = scan.scores[t], scan.places[t], h.shape[0]
    order(scores, places, n)
    for i in range(min(n, FETCHED)):
        fetch(lists.weights, np.int64(lists.classes[places[i]]) * width, width)
    top = scan.shifts[t]
    for i in range(n):
        at = places[i]
        if i + FETCHED < n and i < k:
            fetch(lists.weights, np.int64(lists.classes[places[i + FETCHED]]) * width, width)
        known = best.counts[b] == k
        if not known or scores[i] + bound(lists, at, row) >= best.scores[b, k - 1] - slack:
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
