"""Products of a query row of int16 with rows of int8, in whole numbers: three ways, one result.

D hidden, V rows of a list.
"""

import numpy as np
from numpy.typing import NDArray

from service.engine.kernels.borrowed import array_at, stack_words
from service.engine.kernels.jit import Floats, ordered
from service.engine.kernels.products.int16_intrinsics import (
    BYTES,
    EIGHT,
    HAS_VNNI,
    WORDS,
    dots_of_eight_rows,
    dots_of_four_rows,
)
from service.engine.kernels.products.intrinsics import HAS_AVX2, prefetch

PLAIN, BY_AVX2, BY_VNNI = 0, 1, 2
# Of 256 upper + lower, both signed bytes, the largest number; no way may use a larger one, so that
# answers are the same on all processors.
LARGEST_STEP = 127 * 256 + 127
ROUNDER = 6755399441055744.0  # adding and subtracting it rounds a float64 to a whole number
FLOAT = 4  # bytes
FEW = EIGHT // 2  # words, for the numbers of fewer rows than EIGHT
AHEAD = 24  # rows that are asked for before they are used
LINE = 64  # bytes of the caches

Bytes = NDArray[np.int8]
Rows = NDArray[np.int32]


@ordered
def way_for(width: int) -> int:
    """The fastest one that this processor has."""
    if HAS_VNNI and width >= BYTES:
        return BY_VNNI
    return BY_AVX2 if HAS_AVX2 and width >= WORDS else PLAIN


@ordered
def bytes_for(width: int) -> int:
    """How many a row of x takes, with its correction; a multiple of a vector's."""
    return 2 * ((width + BYTES - 1) // BYTES * BYTES) + BYTES


@ordered
def lay_out(h: Floats, per_one: float, way: int, x: Bytes) -> None:
    """Fills in x [bytes_for(D)] with h [D] in whole steps, as `add_up` wants them: `per_one` of
    them for 1.

    In blocks, of which the last one ends where the row ends: where it overlaps the one before it,
    it is zero.
    """
    width, numbers, place = h.shape[0], h.ctypes.data, x.ctypes.data
    if way == PLAIN:
        in_words(h, per_one, x.view(np.int16))
        return
    if way == BY_AVX2:
        full, words = width // WORDS * WORDS, x.view(np.int16)
        in_words(h[:full], per_one, words)
        words[full : full + WORDS] = 0
        in_words(h[full:], per_one, words[full + WORDS - (width - full) :])
        return
    total, full = np.int32(0), width // BYTES * BYTES
    for d in range(0, full, BYTES):
        lower = place + 2 * d
        # As arrays of their own: so many numbers, which are all that LLVM has to consider.
        total += in_bytes(
            array_at(numbers + FLOAT * d, BYTES, np.float32),
            per_one,
            array_at(lower, BYTES, np.int8),
            array_at(lower + BYTES, BYTES, np.int8),
        )
    if full < width:
        begin = 2 * full + BYTES - (width - full)
        x[2 * full : 2 * full + 2 * BYTES] = 0
        total += in_bytes(h[full:], per_one, x[begin:], x[begin + BYTES :])
    correction = 2 * ((width + BYTES - 1) // BYTES) * BYTES
    x.view(np.int32)[correction // 4] = np.int32(-128 * total)


@ordered
def rounded(number: np.float32, per_one: float) -> np.int32:
    return np.int32((np.float64(number) * per_one + ROUNDER) - ROUNDER)


@ordered
def in_words(h: Floats, per_one: float, words: NDArray[np.int16]) -> None:
    for d in range(h.shape[0]):
        words[d] = np.int16(rounded(h[d], per_one))


@ordered
def in_bytes(h: Floats, per_one: float, lower: Bytes, upper: Bytes) -> np.int32:
    """Fills in the bytes of whole numbers: 256 upper + lower. Returns the sum of the numbers."""
    total = np.int32(0)
    for d in range(h.shape[0]):
        whole = rounded(h[d], per_one)
        low = np.int8(whole)
        lower[d] = low
        upper[d] = np.int8((whole - np.int32(low)) >> 8)
        total = np.int32(total + whole)
    return total


@ordered
def int_dot(whole: NDArray[np.int16], row: Bytes) -> np.int32:
    """Of one row, in a plain loop."""
    total = np.int32(0)
    for d in range(row.shape[0]):
        # Said to be 32 bits at each step, or else the sum is made in 64.
        total = np.int32(total + np.int32(np.int32(whole[d]) * np.int32(row[d])))
    return total


@ordered
def add_up(
    x: Bytes,  # as `lay_out` filled it in
    way: int,
    table: Bytes,  # rows of int8, one after the other
    rows: Rows,  # which of them, and which will be wanted after them
    n: int,  # how many are wanted now
    width: int,
    in_a_row: bool,  # whether the rows are those of the table from the first on
    sums: Rows,  # [n] to fill in, and EIGHT more for scratch
) -> None:
    if way == PLAIN:
        whole = x.view(np.int16)
        for i in range(n):
            first = np.int64(rows[i]) * width
            sums[i] = int_dot(whole, table[first : first + width])
    elif n >= EIGHT:
        addresses = x.ctypes.data, table.ctypes.data, rows.ctypes.data, sums.ctypes.data
        add_many(addresses, way, rows.shape[0], n, width, in_a_row)
    elif n > 0:
        few = stack_words(FEW)
        numbers = array_at(few, EIGHT, np.int32)
        for i in range(EIGHT):
            numbers[i] = rows[min(i, n - 1)]
        addresses = x.ctypes.data, table.ctypes.data, few, sums.ctypes.data
        add_many(addresses, way, EIGHT, EIGHT, width, False)


@ordered
def add_many(
    addresses: tuple[int, int, int, int], way: int, known: int, n: int, width: int, in_a_row: bool
) -> None:
    """`add_up` of at least EIGHT rows. With arrays a call would take longer than these."""
    x, table, rows, sums = addresses
    numbers, cells = array_at(rows, known, np.int32), array_at(table, 1, np.int8)
    # Rows in a row are asked for by the products themselves.
    by_itself = in_a_row and way == BY_VNNI
    known, jump = 0 if by_itself else known, AHEAD * width if by_itself else 0
    for i in range(0, n, EIGHT):
        for ahead in range(i + AHEAD, min(i + AHEAD + EIGHT, known)):
            place = np.int64(numbers[ahead]) * width
            for line in range(place, place + width, LINE):
                prefetch(cells, line)
        at = 4 * min(i, n - EIGHT)
        if way == BY_VNNI:
            dots_of_eight_rows(x, table, rows + at, width, jump, sums + at)
        else:
            dots_of_four_rows(x, table, rows + at, width, sums + at)
            dots_of_four_rows(x, table, rows + at + 16, width, sums + at + 16)
