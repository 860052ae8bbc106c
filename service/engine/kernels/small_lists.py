"""The k best classes of a list that is small: all of its scores are looked at together.

As in `certified`: classes whose score and bound do not reach a threshold are left alone, the others
are candidates and scored exactly. Here the threshold is found by halving: how many lower bounds
reach a number is counted in a loop of vectors, which for small lists takes less than a heap.

V classes of the list, k answers.
"""

import numpy as np
from numpy.typing import NDArray

from service.engine.kernels.best import Best, keep
from service.engine.kernels.class_lists import SLACK, ClassLists
from service.engine.kernels.jit import Floats, forced, ordered
from service.engine.kernels.products.bounded_products import (
    Bounds,
    Doubles,
    QueryRows,
    bounds_of,
    exact_score,
    sum_below,
)
from service.engine.kernels.products.float_products import fetch
from service.engine.kernels.products.int16_products import add_up, way_for
from service.engine.kernels.products.intrinsics import larger, smaller

SMALL = 1024  # classes; their scores and bounds stay in the first cache
SMALL_BYTES = 2**19  # of int8 rows, which then stay in the second cache while several rows pass
HALVINGS = 16  # at most
SPARE = 2  # lower bounds that may reach the threshold besides those of k classes

Rows = NDArray[np.int32]


@ordered
def is_small(size: int, width: int) -> bool:
    return size <= SMALL and size * width <= SMALL_BYTES


@forced
def search_small(
    lists: ClassLists,
    which: int,
    h: Floats,  # [D]
    rows: QueryRows,
    b: int,
    best: Best,  # to add to
    products: Rows,  # [V+EIGHT] scratch; so are the others
    scores: Doubles,  # [V]
    lows: Doubles,  # [V]
    exact: Doubles,  # [V]
) -> float:
    """Returns the logsumexp of the list's scores."""
    begin, stop = lists.offsets[which], lists.offsets[which + 1]
    n, width, k = stop - begin, h.shape[0], best.classes.shape[1]
    classes, row = lists.classes[begin:stop], bounds_of(rows, b)
    add_up(rows.x[b], way_for(width), lists.quantised, classes, n, width, False, products)
    biases = lists.biases[begin:stop] if lists.biases.shape[0] > 0 else lists.biases
    scales, errors = lists.scales[begin:stop], lists.errors[begin:stop]
    score_all(products, scales, errors, lists.lengths[begin:stop], biases, row, scores, lows)
    slack = lists.facts[SLACK]
    floor = least_of_best(lows[:n], k) - 2 * slack if n > k else -np.inf
    if best.counts[b] == k:  # of other lists
        floor = max(floor, best.scores[b, k - 1] - slack)
    count = 0
    for i in range(n):  # written in any case, and kept if it is one: no pattern to predict
        high = 2 * scores[i] - lows[i]
        products[count], lows[count] = i, high
        count += high >= floor
    for j in range(count):
        fetch(lists.weights, np.int64(classes[products[j]]) * width, width)
    for j in range(count):
        if best.counts[b] < k or lows[j] >= best.scores[b, k - 1] - slack:
            c = int(classes[products[j]])
            exact[j] = exact_score(lists, h, c)
            keep(best, b, exact[j], c)
    # Only scores that reach the k-th best one are replaced, whatever was known before.
    reached = best.scores[b, k - 1] - slack if best.counts[b] == k else -np.inf
    for j in range(count):
        if lows[j] >= reached:
            scores[products[j]] = exact[j]
    shift = largest_of(scores[:n])
    return float(shift + np.log(sum_below(scores, n, shift)))


@ordered
def score_all(
    sums: Rows,  # [V]
    scales: Floats,  # [V]
    errors: Floats,  # [V]
    lengths: Floats,  # [V]
    biases: Floats,  # [V], or empty
    row: Bounds,
    scores: Doubles,  # [V] to fill in: approximate ones
    lows: Doubles,  # [V] to fill in: what the exact ones are at least
) -> None:
    for i in range(scales.shape[0]):
        score = np.float64(sums[i]) * (np.float64(scales[i]) * row.step)
        scores[i] = score
        lows[i] = score - (errors[i] * row.length + lengths[i] * row.remainder)
    for i in range(biases.shape[0]):
        scores[i] += biases[i]
        lows[i] += biases[i]


@ordered
def least_of_best(numbers: Doubles, k: int) -> float:
    """A number that at least k of them reach, and seldom many more."""
    low, high = least_of(numbers), largest_of(numbers)
    for _ in range(HALVINGS):
        middle = 0.5 * low + 0.5 * high
        count = how_many_reach(numbers, middle)
        if count >= k:
            low = middle
            if count <= k + SPARE:
                break
        else:
            high = middle
    return low


@ordered
def how_many_reach(numbers: Doubles, what: float) -> int:
    count = np.int32(0)
    for i in range(numbers.shape[0]):
        count = np.int32(count + np.int32(numbers[i] >= what))
    return int(count)


@ordered
def largest_of(numbers: Doubles) -> float:
    found = numbers[0]
    for i in range(1, numbers.shape[0]):
        found = larger(found, numbers[i])
    return float(found)


@ordered
def least_of(numbers: Doubles) -> float:
    found = numbers[0]
    for i in range(1, numbers.shape[0]):
        found = smaller(found, numbers[i])
    return float(found)
