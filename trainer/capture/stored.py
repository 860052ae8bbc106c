"""How hidden vectors are stored: as float32, or as float16 if all of their numbers fit.

M rows, D hidden.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import DSSError

STORED = {"fp32": np.dtype("<f4"), "fp16": np.dtype("<f2")}


class VectorsNotFinite(DSSError):
    pass


class VectorsTooLarge(DSSError):
    """A hidden vector has a number too large for float16."""


def stored(found: NDArray[np.float32], dtype: np.dtype[Any], number: int) -> NDArray[Any]:
    """The vectors [M,D] of the batch of this number, in that type."""
    if not np.isfinite(found).all():
        raise VectorsNotFinite(f"Batch {number} has a NaN or an infinity in a hidden vector.")
    with np.errstate(over="ignore"):
        rows = found.astype(dtype)
    if not np.isfinite(rows).all():
        raise VectorsTooLarge(
            f"Batch {number} has a hidden vector with {np.abs(found).max():.3g} in it, which"
            " float16 cannot hold; choose dtype='fp32'."
        )
    return rows
