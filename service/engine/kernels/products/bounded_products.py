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
from service.engine.kernels.jit import REORDERED, Floats, compiled, forced, ordered, reordered
from service.engine.kernels.products.int16_products import LARGEST_STEP, bytes_for, lay_out, way_for
from service.engine.kernels.products.intrinsics import larger
from service.engine.kernels.scores import exponential

LARGEST_SUM = 2147483000.0  # fits into 32 bits
FARTHEST = 0.50001  # steps: a number may be a half from its whole steps, and what rounding adds
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
def words_for_rows(n: int, width: int) -> int:
    """How many words of space `in_steps` needs."""
    return n * (3 + bytes_for(width) // 8)


@ordered
def in_steps(lists: ClassLists, hidden: Floats, space: Doubles) -> QueryRows:
    n, width = hidden.shape
    cells = n * bytes_for(width) // 8
    x = space[3 * n : 3 * n + cells].view(np.int8).reshape((n, bytes_for(width)))
    rows = QueryRows(x, space[:n], space[n : 2 * n], space[2 * n : 3 * n])
    for b in range(n):
        row_in_steps(hidden[b], lists.facts[LONGEST], b, rows)
    return rows


@ordered
def row_in_steps(h: Floats, longest: float, b: int, rows: QueryRows) -> None:
    """Fills in row b: h in whole steps, as many as 16 bits hold and whose sums fit into 32."""
    width = h.shape[0]
    largest, length = np.float64(largest_size(h)), np.sqrt(exact_product(h, h))
    if largest == 0.0:
        rows.x[b, :] = 0
        rows.steps[b] = 0.0
        rows.lengths[b] = rows.remainders[b] = NEXT_TO_NOTHING
        return
    # |x.w8| is at most |x| |w8|, and |x| at most |h| / step and half a step for each number.
    fitting = (LARGEST_SUM / max(longest, 1.0) - np.sqrt(width)) * (largest / length)
    most = np.floor(min(float(LARGEST_STEP), fitting))
    step = largest / most
    lay_out(h, most / largest, way_for(width), rows.x[b])
    rows.steps[b] = step
    rows.lengths[b] = length * UP
    rows.remainders[b] = FARTHEST * step * np.sqrt(width)


@compiled({*REORDERED, "nnan"})
def largest_size(h: Floats) -> np.float32:
    largest = ZERO
    for d in range(h.shape[0]):
        largest = larger(largest, abs(h[d]))
    return largest


# --- of classes that are looked at together: loops that are made of vectors ---------------------


class Bounds(NamedTuple):
    """Of one row: what makes scores and bounds of sums of products."""

    step: float
    length: float
    remainder: float


@forced
def bounds_of(rows: QueryRows, b: int) -> Bounds:
    return Bounds(rows.steps[b], rows.lengths[b], rows.remainders[b])


@ordered
def score_and_mark(
    sums: NDArray[np.int32],
    scales: Floats,  # [V]
    errors: Floats,  # [V]
    lengths: Floats,  # [V]
    row: Bounds,
    floor: float,
    scores: Doubles,  # [V] to fill in: approximate ones
    marks: NDArray[np.uint8],  # [V] to fill in: whether the exact score may be `floor`
) -> int:
    """Returns how many are marked."""
    count = 0
    for i in range(scales.shape[0]):
        score = np.float64(sums[i]) * (np.float64(scales[i]) * row.step)
        scores[i] = score
        marked = score + (errors[i] * row.length + lengths[i] * row.remainder) >= floor
        marks[i] = marked
        count += marked
    return count


@ordered
def score_with_bias(
    sums: NDArray[np.int32],
    scales: Floats,  # [V]
    biases: Floats,  # [V]
    row: Bounds,
    scores: Doubles,  # [V] to fill in
) -> None:
    for i in range(scales.shape[0]):
        scores[i] = np.float64(sums[i]) * (np.float64(scales[i]) * row.step) + biases[i]


@ordered
def mark(
    scores: Doubles,  # [V]
    errors: Floats,  # [V]
    lengths: Floats,  # [V]
    row: Bounds,
    floor: float,
    marks: NDArray[np.uint8],  # [V] to fill in
) -> int:
    count = 0
    for i in range(errors.shape[0]):
        marked = scores[i] + (errors[i] * row.length + lengths[i] * row.remainder) >= floor
        marks[i] = marked
        count += marked
    return count


@reordered
def sum_below(scores: Doubles, n: int, shift: float) -> np.float32:
    """Of e^(score - shift), no score above the shift."""
    total = ZERO
    for i in range(n):
        total += exponential(np.float32(scores[i] - shift))
    return total


@reordered
def sum_unmarked(scores: Doubles, marks: NDArray[np.uint8], n: int, shift: float) -> np.float32:
    """`sum_below` of scores that are not marked; the others may be above the shift."""
    total = ZERO
    for i in range(n):
        power = exponential(np.float32(min(scores[i] - shift, 0.0)))
        total += power if marks[i] == 0 else ZERO
    return total


# --- of one class ------------------------------------------------------------------------------


@forced
def bound(lists: ClassLists, at: int, row: Bounds) -> float:
    """How far the approximate score with the class at `at` may be from the exact one."""
    off: float = lists.errors[at] * row.length + lists.lengths[at] * row.remainder
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
