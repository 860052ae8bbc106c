"""Hidden vectors as .npy bodies, in parts of a size that the server accepts.

Shapes: B rows, D hidden, k answers.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from service import npy
from service.client.errors import PartTooLarge, QueryRefused

Rows = NDArray[np.floating[Any]]
FLOAT16, FLOAT32 = np.dtype("<f2"), np.dtype("<f4")
HEADER_BYTES = 128  # of a .npy file of such an array
DEFAULT_K = 10
MODES_KEPT = 64


def rows(hidden: ArrayLike) -> Rows:
    """float32 or float16, [B,D], contiguous."""
    try:
        array = np.asarray(hidden)
    except Exception as error:  # arrays of other libraries raise anything
        raise QueryRefused(f"hidden cannot be read as an array: {error}") from error
    if array.dtype.kind not in "fiub":
        raise QueryRefused(f"hidden must hold numbers; its type is {array.dtype}.")
    if array.ndim == 1:
        array = array[np.newaxis]
    if array.ndim != 2:
        raise QueryRefused(
            f"hidden has {array.ndim} dimensions; a row [D] or rows [B,D] are needed,"
            " and hidden.reshape(-1, D) makes rows of more."
        )
    if not array.size:
        raise QueryRefused(f"hidden has shape {list(array.shape)}: there is nothing to ask.")
    dtype = FLOAT16 if array.dtype == FLOAT16 else FLOAT32
    with np.errstate(over="ignore"):  # the server's error names the number that is too large
        return np.ascontiguousarray(array, dtype)


def body(part: Rows) -> tuple[bytes, memoryview]:
    """A .npy file's header and its data."""
    return _header(part.dtype, part.shape), part.data


@lru_cache(maxsize=256)
def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    return npy.header_of(dtype, shape)


@dataclass
class PartLimits:
    """How much one request may hold: a server's default limits, lowered when it refuses a part."""

    rows: int = 4096
    body_bytes: int = 8 * 2**20
    answers: int = 2**20  # rows times k
    searched: dict[str, int] = field(default_factory=dict)  # rows, by how much each one searches

    def split(self, whole: Rows, k: int | None, mode: str = "") -> list[Rows]:
        """Parts of about the same size."""
        row_bytes = whole.shape[1] * whole.dtype.itemsize
        most = min(
            self.rows,
            (self.body_bytes - HEADER_BYTES) // row_bytes,
            self.answers // (k or DEFAULT_K),
            self.searched.get(mode, self.rows),
        )
        parts = math.ceil(len(whole) / max(most, 1))
        return [whole] if parts == 1 else np.array_split(whole, parts)

    def learn(self, refusal: PartTooLarge, part: Rows, k: int | None, mode: str = "") -> None:
        """Lowers the limit that was exceeded to half of the refused part."""
        half = len(part) // 2
        if refusal.type == "urn:dss:problem:too-many-rows":
            self.rows = half
        elif refusal.type == "urn:dss:problem:too-many-answers":
            self.answers = half * (k or DEFAULT_K)
        elif refusal.type == "urn:dss:problem:too-much-to-search":
            if len(self.searched) >= MODES_KEPT:
                self.searched.clear()
            self.searched[mode] = half
        else:  # the size of a body, which proxies limit too
            self.body_bytes = HEADER_BYTES + half * part.shape[1] * part.dtype.itemsize
