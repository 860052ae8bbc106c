"""Products of query rows with float matrices, in compiled loops.

A matrix of V classes is stored by column, [D,V]: W h is then a sum over D of scaled columns, added
in the same order for one row and for many. So a row's scores do not depend on its batch, bit for
bit, and sums need not be gathered from the lanes of a vector. Numbers are float32, or float16 that
are widened as they are read (their bits, as uint16).

D hidden, V classes of an expert, T rows that are scored together.
"""

import numpy as np

from service.engine.kernels.jit import Floats, Integers, ordered, reordered
from service.engine.kernels.products.intrinsics import (
    COLUMNS,
    HAS_AVX2,
    add_block_products,
    add_half_block_products,
    prefetch,
    widened,
)

ONE_ROW_TILE = 4096  # columns whose sums stay in the first cache
TILE = 1024  # columns of a matrix that mostly stay in the second cache while many rows pass

ZERO = np.float32(0)


@ordered
def add_products(h: Floats, matrix: Floats, first: int, stride: int, y: Floats) -> None:
    """y[v] += sum over d of h[d] matrix[first + d stride + v].

    Memory is read from eight places at once that are far from each other, an eighth of the matrix:
    each is then one long stream, which processors fetch ahead. So d goes 0, D/8, 2 D/8, ..., then
    1, D/8 + 1, and so on, and what is left of D comes last.
    """
    width, eighth = y.shape[0], h.shape[0] // 8
    jump = eighth * stride
    for d in range(eighth):
        h0, h1, h2, h3 = h[d], h[eighth + d], h[2 * eighth + d], h[3 * eighth + d]
        h4, h5, h6 = h[4 * eighth + d], h[5 * eighth + d], h[6 * eighth + d]
        h7 = h[7 * eighth + d]
        at = first + d * stride
        w0, w1 = matrix[at : at + width], matrix[at + jump : at + jump + width]
        at += 2 * jump
        w2, w3 = matrix[at : at + width], matrix[at + jump : at + jump + width]
        at += 2 * jump
        w4, w5 = matrix[at : at + width], matrix[at + jump : at + jump + width]
        at += 2 * jump
        w6, w7 = matrix[at : at + width], matrix[at + jump : at + jump + width]
        for v in range(width):
            part = ((y[v] + h0 * widened(w0[v])) + h1 * widened(w1[v])) + h2 * widened(w2[v])
            part = ((part + h3 * widened(w3[v])) + h4 * widened(w4[v])) + h5 * widened(w5[v])
            y[v] = (part + h6 * widened(w6[v])) + h7 * widened(w7[v])
    for d in range(8 * eighth, h.shape[0]):
        at = first + d * stride
        h0, w0 = h[d], matrix[at : at + width]
        for v in range(width):
            y[v] = y[v] + h0 * widened(w0[v])


@ordered
def add_products_of_two(
    g: Floats, h: Floats, matrix: Floats, first: int, stride: int, x: Floats, y: Floats
) -> None:
    """`add_products` of g into x and of h into y, in the same order: the matrix is read once."""
    width, eighth = y.shape[0], h.shape[0] // 8
    jump = eighth * stride
    for d in range(eighth):
        for half in range(2):  # eight columns of two rows would need too many registers
            c = 4 * half * eighth + d
            at = first + c * stride
            g0, g1, g2, g3 = g[c], g[c + eighth], g[c + 2 * eighth], g[c + 3 * eighth]
            h0, h1, h2, h3 = h[c], h[c + eighth], h[c + 2 * eighth], h[c + 3 * eighth]
            w0, w1 = matrix[at : at + width], matrix[at + jump : at + jump + width]
            at += 2 * jump
            w2, w3 = matrix[at : at + width], matrix[at + jump : at + jump + width]
            for v in range(width):
                u0, u1, u2, u3 = widened(w0[v]), widened(w1[v]), widened(w2[v]), widened(w3[v])
                x[v] = (((x[v] + g0 * u0) + g1 * u1) + g2 * u2) + g3 * u3
                y[v] = (((y[v] + h0 * u0) + h1 * u1) + h2 * u2) + h3 * u3
    for d in range(8 * eighth, h.shape[0]):
        at = first + d * stride
        g0, h0, w0 = g[d], h[d], matrix[at : at + width]
        for v in range(width):
            x[v] = x[v] + g0 * widened(w0[v])
            y[v] = y[v] + h0 * widened(w0[v])


@ordered
def score_one_in_cache(h: Floats, matrix: Floats, size: int, scores: Floats) -> None:
    """`score_one` of a float32 matrix that is in the first caches, such as a gate."""
    done = 0
    if HAS_AVX2:
        while done + COLUMNS <= size:
            add_block_products(
                h.ctypes.data,
                h.shape[0],
                matrix.ctypes.data + 4 * done,
                size,
                scores.ctypes.data + 4 * done,
            )
            done += COLUMNS
        if done + COLUMNS // 2 <= size:
            add_half_block_products(
                h.ctypes.data,
                h.shape[0],
                matrix.ctypes.data + 4 * done,
                size,
                scores.ctypes.data + 4 * done,
            )
            done += COLUMNS // 2
    if done < size:
        add_products(h, matrix, done, size, scores[done:size])


@ordered
def score_one(h: Floats, matrix: Floats, first: int, size: int, scores: Floats) -> None:
    """Products of one row with a matrix, added to scores [V]."""
    for begin in range(0, size, ONE_ROW_TILE):
        end = min(begin + ONE_ROW_TILE, size)
        add_products(h, matrix, first + begin, size, scores[begin:end])


@ordered
def score_many(
    hidden: Floats, rows: Integers, matrix: Floats, first: int, size: int, scores: Floats
) -> None:
    """Products of several rows with one matrix, added to scores [T,V]."""
    n = rows.shape[0]
    for begin in range(0, size, TILE):
        end = min(begin + TILE, size)
        t = 0
        while t + 2 <= n:
            add_products_of_two(
                hidden[rows[t]],
                hidden[rows[t + 1]],
                matrix,
                first + begin,
                size,
                scores[t, begin:end],
                scores[t + 1, begin:end],
            )
            t += 2
        if t < n:
            add_products(hidden[rows[t]], matrix, first + begin, size, scores[t, begin:end])


@ordered
def fetch(array: Floats, first: int, n: int) -> None:
    """Asks for n float32 ahead of their use, one cache line after the other."""
    for place in range(first, first + n, 16):
        prefetch(array, place)


@reordered
def dot(a: Floats, b: Floats) -> np.float32:
    """Of a query row with a stored weight row."""
    total = ZERO
    for v in range(a.shape[0]):
        total += a[v] * widened(b[v])
    return total
