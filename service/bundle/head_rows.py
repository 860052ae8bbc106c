"""The rows of a full softmax, as they are and in whole steps, and how far apart these are.

N classes, D hidden.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.errors import ShapeWrong, WeightsNotFinite

STEPS = 127  # of a row's largest number
# Of a step, how far a number may be from its whole steps: a half, and what rounding adds.
FARTHEST = 0.501
NUMBERS_AT_ONCE = 2**18  # they and what is computed from them stay in the second cache
WIDEST = 2**20  # so that sums of products with rows of 16 bits fit into 32
SMALLEST_SCALE = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class HeadRows:
    """What exact answers are computed from: |w.h - scale w8.h| is at most `errors` |h|."""

    weights: NDArray[np.float32]  # [N,D]
    quantised: NDArray[np.int8]  # [N,D] in steps of `scales`
    scales: NDArray[np.float32]  # [N]
    bias: NDArray[np.float32] | None  # [N]
    errors: NDArray[np.float32]  # [N] at least |w - scale w8|, with what rounding adds
    lengths: NDArray[np.float32]  # [N] at least |scale w8|
    longest: float  # at least the largest |w8|


def quantise(
    weights: NDArray[np.float32],  # [N,D]
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Each row in whole steps of its own size, [N,D], and those sizes [N]; a row of zeros has 1."""
    quantised, scales = np.empty(weights.shape, np.int8), np.empty(len(weights), np.float32)
    for part in _parts(weights.shape):
        rows = weights[part].astype(np.float64)
        largest = np.abs(rows).max(axis=1, initial=0)
        scale = np.maximum((largest / STEPS).astype(np.float32), SMALLEST_SCALE)
        scales[part] = np.where(largest > 0, scale, np.float32(1))
        whole = np.rint(rows / scales[part, None].astype(np.float64))
        quantised[part] = np.clip(whole, -STEPS, STEPS)
    return quantised, scales


def measured(
    where: str,
    weights: NDArray[np.float32],  # [N,D] finite
    quantised: NDArray[np.int8],  # [N,D]
    scales: NDArray[np.float32],  # [N]
    bias: NDArray[np.float32] | None,  # [N]
) -> HeadRows:
    """Checks that the whole steps are those of the weights, and works out by how much they differ.

    Everything is computed in steps, which neither overflow nor vanish, and rounded up. Raises a
    BundleError that names the folder `where`.
    """
    if not np.isfinite(scales).all():
        raise WeightsNotFinite(f"{where}/scales.npy holds a NaN or an infinity.")
    if not (scales > 0).all():
        raise ShapeWrong(f"{where}/scales.npy holds a step that is not positive.")
    n_classes, width = weights.shape
    if width > WIDEST:
        raise ShapeWrong(f"{where}/weights.bin has rows of {width} numbers; {WIDEST} are possible.")
    errors, lengths = np.empty(n_classes, np.float32), np.empty(n_classes, np.float32)
    longest = 0.0
    for part in _parts(weights.shape):
        whole = quantised[part].astype(np.float32)
        with np.errstate(over="ignore"):
            away = weights[part] / scales[part, None]
        away -= whole
        if not (np.abs(away).max(initial=0) <= FARTHEST) or (quantised[part] == -128).any():
            raise ShapeWrong(f"{where}/quantised.bin is not weights.bin in whole steps.")
        off, long = _lengths(away), _lengths(whole)
        # The division has rounded each number by up to 2^-24 of 127.5; then both bounds cover what
        # float64 products and sums of a score add.
        off += np.sqrt(width) * 2.0**-16
        off += (width + 16) * 2.0**-50 * (long + off)
        scale = scales[part].astype(np.float64)
        errors[part], lengths[part] = _rounded_up(off * scale), _rounded_up(long * scale)
        longest = max(longest, float(long.max(initial=0)))
    return HeadRows(weights, quantised, scales, bias, errors, lengths, longest)


def _lengths(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Of rows of at most a few hundred steps a number; not less, though summed in float32."""
    squares = np.einsum("nd,nd->n", rows, rows).astype(np.float64)
    lengths: NDArray[np.float64] = np.sqrt(squares) * (1 + rows.shape[1] * 2.0**-23)
    return lengths


def _rounded_up(numbers: NDArray[np.float64]) -> NDArray[np.float32]:
    with np.errstate(over="ignore", under="ignore"):
        return np.nextafter(numbers.astype(np.float32), np.float32(np.inf))


def _parts(shape: tuple[int, ...]) -> Iterator[slice]:
    n_classes, width = shape
    step = max(1, NUMBERS_AT_ONCE // width)
    for first in range(0, n_classes, step):
        yield slice(first, min(n_classes, first + step))
