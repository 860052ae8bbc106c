"""Hidden vectors, labels and head as users have them: `.npy` files, checked before any work starts.

Vectors and labels stay on disk, memory-mapped, so they may be larger than memory.

M rows, D hidden, N classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import DSSError

HIDDEN_TYPES = ("float32", "float16")
HEAD_TYPES = ("float32", "float16", "float64")


class VectorsInvalid(DSSError):
    """An array of the user is refused; nothing was computed or written."""


class ArrayMissing(VectorsInvalid):
    pass


class ArrayUnreadable(VectorsInvalid):
    pass


class ArrayEmpty(VectorsInvalid):
    pass


class NotNpy(VectorsInvalid):
    pass


class DimensionsWrong(VectorsInvalid):
    pass


class TypeWrong(VectorsInvalid):
    pass


class LengthsDisagree(VectorsInvalid):
    pass


class WidthsDisagree(VectorsInvalid):
    pass


class ClassesDisagree(VectorsInvalid):
    pass


class LabelOutOfRange(VectorsInvalid):
    pass


class ValueNotFinite(VectorsInvalid):
    pass


@dataclass(frozen=True)
class Vectors:
    hidden: NDArray[np.floating[Any]]  # [M,D] memory-mapped, float32 or float16
    labels: NDArray[np.integer[Any]]  # [M] memory-mapped, any integer type


@dataclass(frozen=True)
class Head:
    weight: NDArray[np.float32]  # [N,D]
    bias: NDArray[np.float32] | None  # [N]


def chunks(n: int, size: int = 16384) -> Iterator[slice]:
    """0..n-1 in slices of at most `size`."""
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def open_head(path: Path, bias: Path | None = None) -> Head:
    """A trained output layer [N,D], and its bias [N] if it has one, as float32 in memory."""
    weight = _open(path, ("classes", "hidden size"), HEAD_TYPES)
    offset = None if bias is None else _open(bias, ("classes",), HEAD_TYPES)
    if offset is not None and len(offset) != len(weight):
        raise ClassesDisagree(
            f"{bias} has {len(offset)} classes, but {path} has {len(weight)} of them."
        )
    return Head(
        weight=_as_float32(path, weight),
        bias=None if bias is None or offset is None else _as_float32(bias, offset),
    )


def open_vectors(
    hidden: Path, labels: Path, *, n_classes: int | None, hidden_size: int | None
) -> Vectors:
    """Hidden vectors [M,D] and their labels [M]; None leaves N or D to the files.

    Shapes and types are compared first, then all labels and all vectors are read once.
    """
    vectors = Vectors(
        hidden=_open(hidden, ("rows", "hidden size"), HIDDEN_TYPES),
        labels=_open(labels, ("rows",), None),
    )
    rows, width = vectors.hidden.shape
    if len(vectors.labels) != rows:
        raise LengthsDisagree(
            f"{hidden} has {rows} rows, but {labels} has {len(vectors.labels)} labels."
        )
    if hidden_size is not None and width != hidden_size:
        raise WidthsDisagree(f"{hidden} has vectors of {width} numbers, not of {hidden_size}.")
    _check_labels(labels, vectors.labels, n_classes)
    _check_finite(hidden, vectors.hidden)
    return vectors


def open_rows(hidden: Path) -> NDArray[np.floating[Any]]:
    """Hidden vectors [M,D] alone."""
    rows = _open(hidden, ("rows", "hidden size"), HIDDEN_TYPES)
    _check_finite(hidden, rows)
    return rows


def _open(path: Path, axes: tuple[str, ...], types: tuple[str, ...] | None) -> NDArray[Any]:
    """A memory-mapped array with one dimension per axis; `types` None stands for any integer."""
    try:
        if not path.exists():
            raise ArrayMissing(f"{path} does not exist.")
        if not path.is_file():
            raise ArrayUnreadable(f"{path} is not a file.")
        if not path.stat().st_size:
            raise ArrayEmpty(f"{path} is an empty file.")
        array = np.lib.format.open_memmap(path, mode="r")
    except VectorsInvalid:
        raise
    except OSError as error:
        raise ArrayUnreadable(f"{path} cannot be read.") from error
    except Exception as error:  # what NumPy raises for a broken header has no common base
        raise NotNpy(f"{path} is not a whole .npy file of plain numbers.") from error
    if array.ndim != len(axes):
        raise DimensionsWrong(
            f"{path} has shape {list(array.shape)}; [{', '.join(axes)}] is expected."
        )
    if not array.size:
        raise ArrayEmpty(f"{path} has shape {list(array.shape)}, which holds nothing.")
    known = array.dtype.kind in "iu" if types is None else array.dtype.name in types
    if not known:
        wanted = "integers are" if types is None else f"{' or '.join(types)} is"
        raise TypeWrong(f"{path} holds {array.dtype.name}; {wanted} expected.")
    if not array.dtype.isnative:
        raise TypeWrong(f"{path} is not in this machine's byte order.")
    return array


def _check_labels(path: Path, labels: NDArray[Any], n_classes: int | None) -> None:
    for part in chunks(len(labels)):
        read = labels[part]
        wrong = read < 0
        if n_classes is not None:
            wrong |= read >= n_classes
        if wrong.any():
            row = int(np.argmax(wrong))
            allowed = "0 or more" if n_classes is None else f"0 to {n_classes - 1}"
            raise LabelOutOfRange(
                f"{path} has the label {int(read[row])} in row {part.start + row};"
                f" {allowed} is expected."
            )


def _check_finite(path: Path, array: NDArray[Any]) -> None:
    for part in chunks(len(array)):
        finite = np.isfinite(array[part]).reshape(part.stop - part.start, -1).all(axis=1)
        if not finite.all():
            row = part.start + int(np.argmin(finite))
            raise ValueNotFinite(f"{path} has a NaN or an infinity in row {row}.")


def _as_float32(path: Path, array: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # a float64 too large for float32 is found just below
        copy = np.array(array, dtype=np.float32, order="C", subok=False)
    _check_finite(path, copy)
    return copy
