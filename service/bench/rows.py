"""The rows that are asked: a bundle's samples, a file's, or noise.

M rows at hand, B rows of a batch, D hidden.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.bundle.format import SAMPLES
from service.bundle.manifest import read_manifest
from service.errors import DSSError, EmptyBatch, NotFinite, WrongWidth

NOISE_ROWS = 4096
MOST_ROWS = 2**14
MOST_BATCHES = 1024


class RowsUnreadable(DSSError):
    """A file of hidden vectors cannot be used."""


@dataclass(frozen=True)
class Rows:
    hidden: NDArray[np.floating[Any]]  # [M,D]
    source: str

    def batches(self, size: int, most: int = MOST_BATCHES) -> list[NDArray[np.float32]]:
        """Different [B,D], drawn with a fixed seed: the same ones in every run."""
        number = max(1, min(most, MOST_ROWS // size))
        drawn = np.random.default_rng(0).integers(len(self.hidden), size=(number, size))
        batches = [np.ascontiguousarray(self.hidden[rows], np.float32) for rows in drawn]
        if not all(np.isfinite(batch).all() for batch in batches):
            raise NotFinite(f"The rows of {self.source} hold a NaN or an infinity.")
        return batches


def choose(file: Path | None, samples: NDArray[np.float32] | None, width: int) -> Rows:
    """From the file if one is given, else the samples if there are any, else noise."""
    if file is not None:
        return _from_file(file, width)
    if samples is not None:
        return Rows(samples, f"{len(samples):,} samples of the bundle")
    noise = np.random.default_rng(0).normal(size=(NOISE_ROWS, width)).astype(np.float32)
    return Rows(noise, "normal noise, which may visit experts otherwise than real rows do")


def samples(folder: Path) -> NDArray[np.float32] | None:
    """The samples of a bundle, if it has any."""
    if not read_manifest(folder).samples:
        return None
    found: NDArray[np.float32] = np.load(folder / SAMPLES, allow_pickle=False)  # [M,D]
    return found


def _from_file(file: Path, width: int) -> Rows:
    try:
        hidden = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise RowsUnreadable(f"{file} cannot be read as a .npy file.") from error
    if not isinstance(hidden, np.ndarray) or not np.issubdtype(hidden.dtype, np.floating):
        raise RowsUnreadable(f"{file} does not hold an array of floats.")
    if hidden.ndim != 2 or hidden.shape[1] != width:
        raise WrongWidth(f"{file} has shape {list(hidden.shape)}; [rows, {width}] is expected.")
    if not len(hidden):
        raise EmptyBatch(f"{file} holds no row.")
    return Rows(hidden, f"{len(hidden):,} rows of {file}")
