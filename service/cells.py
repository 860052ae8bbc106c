"""Counts as float64 cells: a sheet of cells for each set of labels.

A sheet has one writer, so adding to a cell needs no lock: HTTP sheets are written by the event
loop alone, a model's sheet by the call of its engine, of which there is one at a time. Anyone may
read: a cell is read whole, though two cells may be one event apart.

Several workers have a folder in common, with a file for each sheet of each worker. A file is one
line of JSON, the sheet's key, and then its cells. The worker that takes a dead one's place goes on
in its files, so counts never decrease.
"""

import hashlib
import json
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Key = tuple[str, ...]  # what is counted, then the values of its labels
Values = NDArray[np.float64]

CELL_BYTES = 8
SUFFIX = ".cells"


class Sheet(NamedTuple):
    worker: int
    key: Key
    values: Values


class Cells(ABC):
    @abstractmethod
    def sheet(self, key: Key, size: int) -> Values:
        """This process's own cells for a key, made when first asked for."""

    @abstractmethod
    def sheets(self, key: Key | None = None) -> Iterator[Sheet]:
        """Everyone's, to be read; of one key or of all."""


class PrivateCells(Cells):
    """Of a server that is one process."""

    def __init__(self) -> None:
        self._own: dict[Key, Values] = {}

    def sheet(self, key: Key, size: int) -> Values:
        return self._own.setdefault(key, np.zeros(size))

    def sheets(self, key: Key | None = None) -> Iterator[Sheet]:
        for own, values in list(self._own.items()):
            if key in (None, own):
                yield Sheet(0, own, values)


class SharedCells(Cells):
    """Of one worker of several; `folder` is theirs alone."""

    def __init__(self, folder: Path, worker: int) -> None:
        self._folder = folder
        self._worker = worker
        self._own: dict[Key, Values] = {}

    def sheet(self, key: Key, size: int) -> Values:
        if key not in self._own:
            self._own[key] = self._open(key, size)
        return self._own[key]

    def sheets(self, key: Key | None = None) -> Iterator[Sheet]:
        for path in sorted(self._folder.glob(f"*-{'*' if key is None else _name(key)}{SUFFIX}")):
            line, _, cells = path.read_bytes().partition(b"\n")
            worker = int(path.name.partition("-")[0])
            yield Sheet(worker, tuple(json.loads(line)), np.frombuffer(cells))

    def _open(self, key: Key, size: int) -> Values:
        head = _head(key)
        path = self._folder / f"{self._worker}-{_name(key)}{SUFFIX}"
        length = len(head) + size * CELL_BYTES
        if not path.exists():
            # Others may be reading the folder: a file appears when it is complete.
            unfinished = path.with_suffix(".new")
            unfinished.write_bytes(head.ljust(length, b"\0"))
            unfinished.rename(path)
        elif path.stat().st_size < length:  # the dead worker's bundle had fewer experts
            os.truncate(path, length)
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        return np.frombuffer(mapped, offset=len(head))


def _head(key: Key) -> bytes:
    """A line whose length lets the cells after it be aligned."""
    line = json.dumps(key).encode()
    padding = -(len(line) + 1) % CELL_BYTES
    return line + b" " * padding + b"\n"


def _name(key: Key) -> str:
    """The same for a key in every worker; labels may hold what a file's name may not."""
    return hashlib.sha256(_head(key)).hexdigest()[:16]


def totals(sheets: Iterable[Sheet]) -> dict[Key, Values]:
    """The sum over workers, by key; the longest sheet's cells where they differ in number."""
    found: dict[Key, Values] = {}
    for _, key, values in sheets:
        have = found.get(key)
        if have is None:
            found[key] = values.copy()
        elif len(have) < len(values):
            found[key] = values.copy()
            found[key][: len(have)] += have
        else:
            have[: len(values)] += values
    return found
