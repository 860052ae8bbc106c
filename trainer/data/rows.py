"""Query rows of an array on disk, read as they are asked for.

M query rows, D hidden, b query rows asked for.
"""

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Rows(Protocol):
    """A tensor, or an array on disk that returns the rows asked for as a tensor."""

    def __getitem__(self, rows: Tensor, /) -> Tensor: ...


class MappedRows:
    """Hidden vectors [M,D] on disk; only the rows asked for are read, as float32."""

    def __init__(
        self,
        array: NDArray[np.floating[Any]],
        *,
        chosen: Tensor | None = None,  # numbers of the rows that count; None: all
    ) -> None:
        self._array = array
        self._chosen = chosen

    def __getitem__(self, rows: Tensor, /) -> Tensor:
        numbers = rows if self._chosen is None else self._chosen[rows]
        return torch.from_numpy(self._array[numbers.numpy()].astype(np.float32))  # [b,D]


def sample(n_rows: int, wanted: int, seed: int) -> Tensor:
    """Numbers of some rows in random order, the same for the same seed."""
    return torch.randperm(n_rows, generator=torch.Generator().manual_seed(seed))[:wanted]
