"""Writes a capture's files, so that it can be resumed after any interruption.

Rows are appended to `.npy.part` files behind a header that NumPy leaves room in, so that the number
of rows is filled in at the end without a copy. From time to time the files are flushed to disk and
`progress.json` then says how many of their rows are complete; rows after them are cut off when the
capture is resumed.

M rows, D hidden, N classes.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import DSSError
from trainer.capture import folder as captures
from trainer.data.files import write_json

SAVED_EVERY = 5.0  # seconds
LABEL_TYPE = np.dtype("<i4")
ROUNDING = (0.01, 0.01)  # relative, absolute: another number of threads adds in another order


class FolderTaken(DSSError):
    """The folder holds another capture, or files that a capture would overwrite."""


class GrowingArray:
    """A .npy file that rows are appended to."""

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], rows: int) -> None:
        self._path, self._dtype, self._shape = path, dtype, shape
        self._part = path.with_name(f"{path.name}.part")
        self._begin = len(self._header(0))
        self._row_bytes = dtype.itemsize * int(np.prod(shape))
        if path.exists() and not self._part.exists():
            path.replace(self._part)  # interrupted while all files got their names
        self._part.touch()
        counted = self._begin + rows * self._row_bytes
        if rows and self._part.stat().st_size < counted:
            raise FolderTaken(
                f"{self._part} has lost rows; remove {path.parent} and capture again."
            )
        self._file = self._part.open("r+b")
        self._file.truncate(counted)
        self._file.seek(counted)

    def _header(self, rows: int) -> bytes:
        """A header of the same length for any number of rows."""
        header = BytesIO()
        facts = {"descr": self._dtype.str, "fortran_order": False, "shape": (rows, *self._shape)}
        np.lib.format.write_array_header_1_0(header, facts)
        return header.getvalue()

    def append(self, rows: NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(rows, self._dtype).tobytes())

    def read(self, first: int, count: int) -> NDArray[Any]:
        offset = self._begin + first * self._row_bytes
        numbers = np.fromfile(
            self._part, self._dtype, count * int(np.prod(self._shape)), offset=offset
        )
        return numbers.reshape(-1, *self._shape)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def finish(self, rows: int) -> None:
        """Write the header and give the file its own name: it is complete."""
        self._file.seek(0)
        self._file.write(self._header(rows))
        self.sync()
        self.close()
        self._part.replace(self._path)


@dataclass(frozen=True)
class Progress:
    batches: int = 0
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(captures.SPLITS, 0))

    def after(self, split: str, rows: int) -> "Progress":
        return Progress(self.batches + 1, self.rows | {split: self.rows[split] + rows})


class CaptureFolder:
    """The files of a capture that is under way, and how far it has come."""

    def __init__(
        self, folder: Path, hidden_size: int, dtype: np.dtype[Any], settings: dict[str, Any]
    ) -> None:
        """Writes nothing; the first batch does."""
        self.folder = folder
        self._settings = settings
        self._hidden_size, self._dtype = hidden_size, dtype
        self._arrays: dict[str, tuple[GrowingArray, GrowingArray]] = {}
        self._saved = time.monotonic()
        self.progress = read_progress(folder, settings)

    def holds(
        self,
        split: str,
        first: int,
        labels: NDArray[Any],
        vectors: NDArray[Any] | None,
    ) -> bool:
        """Whether the files have these rows from `first` on; vectors up to rounding."""
        if not len(labels):
            return True
        arrays = self._open(split)
        kept, kept_labels = (array.read(first, len(labels)) for array in arrays)
        same = np.array_equal(kept_labels, labels)
        if same and vectors is not None:
            same = np.allclose(kept.astype(np.float32), vectors.astype(np.float32), *ROUNDING)
        return same

    def append(self, split: str, hidden: NDArray[Any], labels: NDArray[Any]) -> None:
        """One batch: hidden vectors [M,D] and labels [M]."""
        if len(labels):
            for array, rows in zip(self._open(split), (hidden, labels), strict=True):
                array.append(rows)
        self.progress = self.progress.after(split, len(labels))
        if time.monotonic() - self._saved > SAVED_EVERY:
            self.save()

    def save(self) -> None:
        """Flush the files to disk and record how many of their rows are complete."""
        if self._arrays:
            for array in self._all():
                array.sync()
            progress = {"settings": self._settings, **asdict(self.progress)}
            write_json(self.folder / captures.PROGRESS, progress)
        self._saved = time.monotonic()

    def close(self) -> None:
        for array in self._all():
            array.close()

    def finish(
        self, head: NDArray[np.float32], bias: NDArray[np.float32] | None, facts: dict[str, Any]
    ) -> captures.Captured:
        np.save(self.folder / captures.HEAD, head)  # [N,D]
        if bias is not None:
            np.save(self.folder / captures.BIAS, bias)  # [N]
        for split, rows in self.progress.rows.items():
            if rows:
                for array in self._open(split):
                    array.finish(rows)
        write_json(self.folder / captures.FACTS, facts)
        (self.folder / captures.PROGRESS).unlink(missing_ok=True)
        return captures.read_capture(self.folder)

    def _open(self, split: str) -> tuple[GrowingArray, GrowingArray]:
        if split not in self._arrays:
            self.folder.mkdir(parents=True, exist_ok=True)
            rows = self.progress.rows[split]
            hidden, labels = (
                captures.split_file(self.folder, split, name)
                for name in (captures.HIDDEN, captures.LABELS)
            )
            self._arrays[split] = (
                GrowingArray(hidden, self._dtype, (self._hidden_size,), rows),
                GrowingArray(labels, LABEL_TYPE, (), rows),
            )
        return self._arrays[split]

    def _all(self) -> Iterator[GrowingArray]:
        for arrays in self._arrays.values():
            yield from arrays


def read_progress(folder: Path, settings: dict[str, Any]) -> Progress:
    """Where an interrupted capture was; a folder that is not this capture's is refused."""
    if (folder / captures.FACTS).exists():
        raise FolderTaken(f"{folder} holds a complete capture; choose another folder.")
    file = folder / captures.PROGRESS
    if not file.exists():
        for name in (captures.HIDDEN, captures.LABELS, captures.HEAD, captures.BIAS):
            if (folder / name).exists():
                raise FolderTaken(f"{folder} holds a {name} of its own; choose another folder.")
        return Progress()
    try:
        found = json.loads(file.read_text())
        before, progress = (
            found["settings"],
            Progress(found["batches"], Progress().rows | found["rows"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FolderTaken(f"{file} cannot be read; remove {folder} and capture again.") from error
    changed = [
        name for name in sorted({*before, *settings}) if before.get(name) != settings.get(name)
    ]
    if changed:
        raise FolderTaken(
            f"{folder} holds another capture, with another {' and '.join(changed)};"
            " choose another folder."
        )
    return progress
