"""Products of query rows with int8 rows, and how far they may be from the exact ones.

A query row h is x steps and a remainder r, x of 16 bits; a weight row w is w8 scales. The sum of
x w8 is made in whole numbers, without rounding, in any order. So, with |.| the length,

    |w.h - step scale (x.w8)|  <=  |w - scale w8| |h| + |scale w8| |r|

to which `head_rows.measured` has added what float64 rounds.

D hidden, B rows, V classes that are looked at together.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.engine.kernels.class_lists import LONGEST, ClassLists
from service.engine.kernels.int16_products import LARGEST_STEP, bytes_for, lay_out, way_for
from service.engine.kernels.jit import REORDERED, Floats, compiled, forced, ordered, reordered
from service.engine.kernels.scores import exponential

LARGEST_SUM = 2147483000.0  # fits into 32 bits
ROUNDER = 6755399441055744.0  # adding and subtracting it rounds a float64 to a whole number
NEXT_TO_NOTHING = 1e-300  # in place of 0, which times infinity would be no number
UP = 1 + 2.0**-30  # more than lengths are rounded by
ZERO = np.float32(0)

Doubles = NDArray[np.float64]


class QueryRows(NamedTuple):
    """Rows in steps of their own."""

    x: NDArray[np.int8]  # [B,bytes] as `lay_out` fills it in
    steps: Doubles  # [B]
    lengths: Doubles  # [B] |h|
    remainders: Doubles  # [B] |r|


@ordered
def in_steps(lists: ClassLists, hidden: Floats) -> QueryRows:
    n, width = hidden.shape
    x, floats = np.empty((n, bytes_for(width)), np.int8), np.empty((3, n), np.float64)
    rows = QueryRows(x, floats[0], floats[1], floats[2])
    whole = np.empty(width, np.int16)
    for b in range(n):
        row_in_steps(hidden[b], lists.facts[LONGEST], b, rows, whole)
    return rows


@ordered
def row_in_steps(
    h: Floats, longest: float, b: int, rows: QueryRows, whole: NDArray[np.int16]
) -> None:
    """Fills in row b: h in whole steps, as many as 16 bits hold and whose sums fit into 32."""
    width = h.shape[0]
    largest, length = np.float64(largest_size(h)), np.sqrt(exact_product(h, h))
    if largest == 0.0:
        whole[:] = 0
        lay_out(whole, way_for(width), rows.x[b])
        rows.steps[b] = 0.0
        rows.lengths[b] = rows.remainders[b] = NEXT_TO_NOTHING
        return
    # |x.w8| is at most |x| |w8|, and |x| at most |h| / step and half a step for each number.
    fitting = (LARGEST_SUM / max(longest, 1.0) - np.sqrt(width)) * (largest / length)
    most = np.floor(min(float(LARGEST_STEP), fitting))
    step = largest / most
    squares = fill_in(h, most / largest, step, whole)
    lay_out(whole, way_for(width), rows.x[b])
    rows.steps[b] = step
    rows.lengths[b] = length * UP
    rows.remainders[b] = np.sqrt(squares) * UP + length * 2.0**-40


@compiled({*REORDERED, "nnan"})
def largest_size(h: Floats) -> np.float32:
    largest = ZERO
    for d in range(h.shape[0]):
        largest = max(largest, abs(h[d]))
    return largest


@ordered
def fill_in(h: Floats, per_one: float, step: float, whole: NDArray[np.int16]) -> float:
    """Rounds h to whole steps; returns the square of what is left."""
    for d in range(h.shape[0]):
        whole[d] = np.int16((np.float64(h[d]) * per_one + ROUNDER) - ROUNDER)
    return squared_remainder(h, step, whole)


@reordered
def squared_remainder(h: Floats, step: float, whole: NDArray[np.int16]) -> float:
    total = 0.0
    for d in range(h.shape[0]):
        away = np.float64(h[d]) - np.float64(whole[d]) * step
        total += away * away
    return total


# --- of classes that are looked at together: loops without branches, made of vectors ------------


@ordered
def fill_in_scores(
    sums: NDArray[np.int32],  # [V]
    scales: Floats,  # [V]
    biases: Floats,  # [V], or empty
    step: float,
    scores: Doubles,  # [V] to fill in
) -> None:
    """Approximate scores."""
    if biases.shape[0] > 0:
        for i in range(scales.shape[0]):
            scores[i] = np.float64(sums[i]) * (scales[i] * step) + biases[i]
    else:
        for i in range(scales.shape[0]):
            scores[i] = np.float64(sums[i]) * (scales[i] * step)


@ordered
def reaching(
    scores: Doubles,
    errors: Floats,
    lengths: Floats,
    length: float,
    remainder: float,
    floor: float,
) -> int:
    """How many classes may have an exact score of at least `floor`."""
    count = 0
    for i in range(errors.shape[0]):
        if scores[i] + (errors[i] * length + lengths[i] * remainder) >= floor:
            count += 1
    return count


@reordered
def sum_below(scores: Doubles, n: int, shift: float) -> np.float32:
    """Of e^(score - shift), no score above the shift."""
    total = ZERO
    for i in range(n):
        total += exponential(np.float32(scores[i] - shift))
    return total


@reordered
def sum_marked(scores: Doubles, marks: NDArray[np.uint8], n: int, shift: float) -> np.float32:
    """`sum_below` of scores that are not marked; the others may be above the shift."""
    total = ZERO
    for i in range(n):
        power = exponential(np.float32(min(scores[i] - shift, 0.0)))
        total += power if marks[i] == 0 else ZERO
    return total


@ordered
def mark_reaching(
    scores: Doubles,
    errors: Floats,
    lengths: Floats,
    length: float,
    remainder: float,
    floor: float,
    marks: NDArray[np.uint8],  # [V] to fill in
) -> None:
    """Those that `reaching` counts."""
    for i in range(errors.shape[0]):
        marks[i] = scores[i] + (errors[i] * length + lengths[i] * remainder) >= floor


# --- of one class ------------------------------------------------------------------------------


@forced
def bound(lists: ClassLists, at: int, length: float, remainder: float) -> float:
    """How far the approximate score with the class at `at` may be from the exact one, of a row of
    this length and this remainder."""
    off: float = lists.errors[at] * length + lists.lengths[at] * remainder
    return off


@reordered
def exact_product(h: Floats, row: Floats) -> float:
    """In float64, by the same loop for every row."""
    total = 0.0
    for d in range(h.shape[0]):
        total += np.float64(h[d]) * np.float64(row[d])
    return total


@forced
def exact_score(lists: ClassLists, h: Floats, c: int) -> float:
    width = h.shape[0]
    score = exact_product(h, lists.weights[c * width : (c + 1) * width])
    if lists.biases.shape[0] > 0:
        everything = lists.offsets[lists.offsets.shape[0] - 2]
        score += lists.biases[everything + c]
    return score
