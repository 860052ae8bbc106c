"""Products of query rows with int8 matrices, in compiled loops.

No order of adding changes a sum of whole numbers, so int8 matrices are stored by row, [V,D].

D hidden, V classes of an expert, T rows that are scored together.
"""

import numpy as np
from numpy.typing import NDArray

from service.bundle.quantisation import ACTIVATION_STEPS
from service.engine.kernels.jit import Floats, Integers, allocating, ordered
from service.engine.kernels.products.intrinsics import BLOCK, HAS_AVX2, dots_of_four

TILE = 64  # weight rows that stay in the first cache while many query rows pass

TINY = np.finfo(np.float32).tiny
STEPS = np.float32(ACTIVATION_STEPS)
ROUNDER = np.float32(12582912)  # adding and subtracting it rounds to a whole number


@ordered
def quantise(h: Floats, x: NDArray[np.int8]) -> np.float32:
    """Fills in h in whole steps, and returns the size of a step.

    They are laid out in blocks, the last of which ends where the row ends: see `dots_of_four`.
    """
    n = h.shape[0]
    largest = TINY
    for d in range(n):
        largest = max(largest, abs(h[d]))
    steps = STEPS / largest
    x[:] = 0
    full = n // BLOCK * BLOCK if n >= BLOCK else n
    for d in range(full):
        x[d] = np.int8((h[d] * steps + ROUNDER) - ROUNDER)
    for d in range(full, n):
        x[full + BLOCK - n + d] = np.int8((h[d] * steps + ROUNDER) - ROUNDER)
    return largest / STEPS


@ordered
def blocks_of(width: int) -> int:
    """How many bytes `quantise` fills for a row."""
    return (width + BLOCK - 1) // BLOCK * BLOCK


@ordered
def int8_dot(x: NDArray[np.int8], row: NDArray[np.int8]) -> np.int32:
    """`dots_of_four` of one row and of any width, in a plain loop."""
    width = row.shape[0]
    full = width // BLOCK * BLOCK if width >= BLOCK else width
    total = np.int32(0)
    for d in range(full):
        # Said to be 32 bits at each step, or else the sum is made in 64.
        total = np.int32(total + np.int32(np.int32(x[d]) * np.int32(row[d])))
    for d in range(full, width):
        number = np.int32(x[full + BLOCK - width + d])
        total = np.int32(total + np.int32(number * np.int32(row[d])))
    return total


@allocating
def add_int8_products(
    x: NDArray[np.int8],  # as `quantise` lays it out
    step: np.float32,
    width: int,
    matrix: NDArray[np.int8],
    scales: Floats,
    first: int,
    y: Floats,
) -> None:
    """y[v] += scales[first + v] step (sum over d of x[d] matrix[(first + v) D + d])."""
    n, v = y.shape[0], 0
    if HAS_AVX2 and width >= BLOCK:
        sums = np.empty(4, np.int32)
        while v + 4 <= n:
            rows = matrix.ctypes.data + (first + v) * width
            dots_of_four(x.ctypes.data, rows, width, sums.ctypes.data)
            for i in range(4):
                y[v + i] = y[v + i] + np.float32(sums[i]) * scales[first + v + i] * step
            v += 4
    while v < n:
        at = (first + v) * width
        total = int8_dot(x, matrix[at : at + width])
        y[v] = y[v] + np.float32(total) * scales[first + v] * step
        v += 1


@allocating
def score_int8(
    hidden: Floats,
    rows: Integers,
    matrix: NDArray[np.int8],
    scales: Floats,
    first: int,
    size: int,
    scores: Floats,
) -> None:
    """Approximate products of query rows with an expert's weight rows, added to scores [T,V]."""
    n, width = rows.shape[0], hidden.shape[1]
    quantised, steps = np.empty((n, blocks_of(width)), np.int8), np.empty(n, np.float32)
    for t in range(n):
        steps[t] = quantise(hidden[rows[t]], quantised[t])
    tile = size if n == 1 else TILE
    for begin in range(0, size, tile):
        end = min(begin + tile, size)
        for t in range(n):
            add_int8_products(
                quantised[t], steps[t], width, matrix, scales, first + begin, scores[t, begin:end]
            )
