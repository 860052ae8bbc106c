"""Products of query rows with int8 rows, and how far they may be from the exact ones.

A query row h is x steps and a remainder r, x of 16 bits; a weight row w is w8 scales. The sum of
x w8 is made in whole numbers, without rounding, in any order. So, with |.| the length,

    |w.h - step scale (x.w8)|  <=  |w - scale w8| |h| + |scale w8| |r|

to which `head_rows.measured` has added what float64 rounds.

D hidden, B rows.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.engine.kernels.class_lists import LONGEST, ClassLists
from service.engine.kernels.intrinsics import HAS_AVX2, WORDS, dots_with_four_rows, prefetch
from service.engine.kernels.jit import REORDERED, Floats, compiled, ordered, reordered

CHUNK = 128  # classes whose scores are looked at together; calls cost as much as some of them
AHEAD = 8  # classes whose rows are asked for before they are used

LARGEST_STEP = 32767.0
LARGEST_SUM = 2147483000.0  # fits into 32 bits
ROUNDER = 6755399441055744.0  # adding and subtracting it rounds a float64 to a whole number
NEXT_TO_NOTHING = 1e-300  # in place of 0, which times infinity would be no number
UP = 1 + 2.0**-30  # more than lengths are rounded by


class QueryRows(NamedTuple):
    """Rows in steps of their own."""

    x: NDArray[np.int16]  # [B,blocks]
    steps: NDArray[np.float64]  # [B]
    lengths: NDArray[np.float64]  # [B] |h|
    remainders: NDArray[np.float64]  # [B] |r|


@ordered
def words_of(width: int) -> int:
    """How many int16 a row of x takes."""
    return (width + WORDS - 1) // WORDS * WORDS


@ordered
def in_steps(lists: ClassLists, hidden: Floats) -> QueryRows:
    n, width = hidden.shape
    floats = np.empty((3, n), np.float64)
    rows = QueryRows(np.zeros((n, words_of(width)), np.int16), floats[0], floats[1], floats[2])
    for b in range(n):
        row_in_steps(hidden[b], lists.facts[LONGEST], b, rows)
    return rows


@ordered
def row_in_steps(h: Floats, longest: float, b: int, rows: QueryRows) -> None:
    """Fills in row b: h in whole steps, as many as 16 bits hold and whose sums fit into 32.

    They are laid out in blocks, the last of which ends where the row ends: see
    `dots_with_four_rows`.
    """
    width = h.shape[0]
    largest, length = np.float64(largest_size(h)), np.sqrt(exact_product(h, h))
    if largest == 0.0:
        rows.steps[b] = 0.0
        rows.lengths[b] = rows.remainders[b] = NEXT_TO_NOTHING
        return
    # |x.w8| is at most |x| |w8|, and |x| at most |h| / step and half a step for each number.
    fitting = (LARGEST_SUM / max(longest, 1.0) - np.sqrt(width)) * (largest / length)
    most = np.floor(min(LARGEST_STEP, fitting))
    step = largest / most
    full = width // WORDS * WORDS if width >= WORDS else width
    squares = fill_in(h[:full], most / largest, step, rows.x[b])
    last = rows.x[b, 2 * full + WORDS - width :]  # the last block's own numbers
    squares += fill_in(h[full:], most / largest, step, last)
    rows.steps[b] = step
    rows.lengths[b] = length * UP
    rows.remainders[b] = np.sqrt(squares) * UP + length * 2.0**-40


@compiled({*REORDERED, "nnan"})
def largest_size(h: Floats) -> np.float32:
    largest = np.float32(0)
    for d in range(h.shape[0]):
        largest = max(largest, abs(h[d]))
    return largest


@ordered
def fill_in(h: Floats, per_one: float, step: float, x: NDArray[np.int16]) -> float:
    """Rounds h to whole steps; returns the square of what is left."""
    for d in range(h.shape[0]):
        x[d] = np.int16((np.float64(h[d]) * per_one + ROUNDER) - ROUNDER)
    return squared_remainder(h, step, x)


@reordered
def squared_remainder(h: Floats, step: float, x: NDArray[np.int16]) -> float:
    total = 0.0
    for d in range(h.shape[0]):
        away = np.float64(h[d]) - np.float64(x[d]) * step
        total += away * away
    return total


@ordered
def int_dot(x: NDArray[np.int16], row: NDArray[np.int8]) -> np.int32:
    """`dots_with_four_rows` of one row and of any width, in a plain loop."""
    width = row.shape[0]
    full = width // WORDS * WORDS if width >= WORDS else width
    total = np.int32(0)
    for d in range(full):
        # Said to be 32 bits at each step, or else the sum is made in 64.
        total = np.int32(total + np.int32(np.int32(x[d]) * np.int32(row[d])))
    for d in range(full, width):
        number = np.int32(x[full + WORDS - width + d])
        total = np.int32(total + np.int32(number * np.int32(row[d])))
    return total


@ordered
def add_up(
    lists: ClassLists,
    x: NDArray[np.int16],
    width: int,
    begin: int,  # in the lists
    end: int,
    stop: int,  # where the list ends, if its rows are scattered; those of all classes are not
    sums: NDArray[np.int32],  # [CHUNK+3] to fill in
) -> None:
    """Of the products of x with the rows of some classes of a list."""
    if not HAS_AVX2 or width < WORDS:
        for at in range(begin, end):
            first = np.int64(lists.classes[at]) * width
            sums[at - begin] = int_dot(x, lists.quantised[first : first + width])
        return
    base, last = lists.quantised.ctypes.data, end - 1
    for at in range(begin, end, 4):
        for ahead in range(at + AHEAD, min(at + AHEAD + 4, stop)):
            place = np.int64(lists.classes[ahead]) * width
            for line in range(place, place + width, 64):
                prefetch(lists.quantised, line)
        dots_with_four_rows(
            x.ctypes.data,
            base + np.int64(lists.classes[at]) * width,
            base + np.int64(lists.classes[min(at + 1, last)]) * width,
            base + np.int64(lists.classes[min(at + 2, last)]) * width,
            base + np.int64(lists.classes[min(at + 3, last)]) * width,
            width,
            sums.ctypes.data + 4 * (at - begin),
        )


@ordered
def fill_in_scores(
    sums: NDArray[np.int32],
    scales: Floats,
    biases: Floats,  # or empty
    step: float,
    scores: NDArray[np.float64],  # to fill in
) -> None:
    """Approximate scores of some classes."""
    if biases.shape[0] > 0:
        for i in range(scales.shape[0]):
            scores[i] = np.float64(sums[i]) * (scales[i] * step) + biases[i]
    else:
        for i in range(scales.shape[0]):
            scores[i] = np.float64(sums[i]) * (scales[i] * step)


@ordered
def reaching(
    scores: NDArray[np.float64],
    errors: Floats,
    lengths: Floats,
    length: float,
    remainder: float,
    floor: float,
) -> int:
    """How many of some classes may have an exact score of at least `floor`."""
    # Apart from where scores are filled in, and counted: such a loop is made of vectors.
    count = 0
    for i in range(errors.shape[0]):
        if scores[i] + (errors[i] * length + lengths[i] * remainder) >= floor:
            count += 1
    return count


@ordered
def bound(lists: ClassLists, at: int, rows: QueryRows, b: int) -> float:
    """How far the approximate score of row b with the class at `at` may be from the exact one."""
    off: float = lists.errors[at] * rows.lengths[b] + lists.lengths[at] * rows.remainders[b]
    return off


@reordered
def exact_product(h: Floats, row: Floats) -> float:
    """In float64, by the same loop for every row."""
    total = 0.0
    for d in range(h.shape[0]):
        total += np.float64(h[d]) * np.float64(row[d])
    return total


@ordered
def exact_score(lists: ClassLists, h: Floats, c: int) -> float:
    width = h.shape[0]
    score = exact_product(h, lists.weights[c * width : (c + 1) * width])
    if lists.biases.shape[0] > 0:
        everything = lists.offsets[lists.offsets.shape[0] - 2]
        score += lists.biases[everything + c]
    return score
