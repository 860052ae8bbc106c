"""Counts as float64 cells: a sheet of cells for each set of labels.

A sheet has one writer, so adding to a cell needs no lock: HTTP sheets are written by the event
loop alone, a model's sheet by the call of its engine, of which there is one at a time. Anyone may
read: a cell is read whole, though two cells may be one event apart.

Several workers have a folder in common, with a file for each sheet of each worker. A file is one
line of JSON, the sheet's key, and then its cells. The worker that takes a dead one's place goes on
in its files, so counts never decrease. A cell is written by one store of eight aligned bytes, so
that a worker killed at any moment leaves each cell as it was before or after.
"""

import hashlib
import json
import logging
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Key = tuple[str, ...]  # what is counted, then the values of its labels
Values = NDArray[np.float64]

CELL_BYTES = 8
SUFFIX = ".cells"


class Sheet(NamedTuple):
    worker: int
    key: Key
    values: Values


class Counters(ABC):
    @abstractmethod
    def sheet(self, key: Key, size: int) -> Values:
        """This process's own cells for a key, made when first asked for."""

    @abstractmethod
    def sheets(self, key: Key | None = None) -> Iterator[Sheet]:
        """Everyone's, to be read; of one key or of all."""

    @abstractmethod
    def drop(self, key: Key) -> None:
        """Forget this process's own cells for a key: nobody counts there any more."""


class LocalCounters(Counters):
    """Of a server that is one process."""

    def __init__(self) -> None:
        self._own: dict[Key, Values] = {}

    def sheet(self, key: Key, size: int) -> Values:
        return self._own.setdefault(key, np.zeros(size))

    def sheets(self, key: Key | None = None) -> Iterator[Sheet]:
        for own, values in list(self._own.items()):
            if key in (None, own):
                yield Sheet(0, own, values)

    def drop(self, key: Key) -> None:
        self._own.pop(key, None)


class SharedCounters(Counters):
    """Of one worker of several; `folder` is theirs alone."""

    def __init__(self, folder: Path, worker: int) -> None:
        self._folder = folder
        self._worker = worker
        self._own: dict[Key, Values] = {}
        self._unshared: dict[Key, Values] = {}  # those of them for which there was no room
        self._complained = False

    def sheet(self, key: Key, size: int) -> Values:
        if key not in self._own:
            try:
                self._own[key] = self._open(key, size)
            except OSError as error:
                self._complain(error)
                self._own[key] = self._unshared[key] = np.zeros(size)
        return self._own[key]

    def sheets(self, key: Key | None = None) -> Iterator[Sheet]:
        for name in sorted(self._names("" if key is None else _name(key))):
            with suppress(FileNotFoundError):  # its worker has just dropped it
                line, _, cells = (self._folder / name).read_bytes().partition(b"\n")
                worker = int(name.partition("-")[0])
                yield Sheet(worker, tuple(json.loads(line)), np.frombuffer(cells))
        for own, values in list(self._unshared.items()):
            if key in (None, own):
                yield Sheet(self._worker, own, values)

    def drop(self, key: Key) -> None:
        self._own.pop(key, None)
        if self._unshared.pop(key, None) is None:
            self._path(key).unlink(missing_ok=True)

    def _open(self, key: Key, size: int) -> Values:
        head, path = _head(key), self._path(key)
        length = len(head) + size * CELL_BYTES
        if not path.exists():
            self._create(path, head.ljust(length, b"\0"))
        with path.open("r+b") as file:
            # The dead worker's bundle may have had fewer experts. Room is taken now: writing to a
            # mapped page that the disk then has no room for would end the process.
            os.posix_fallocate(file.fileno(), 0, length)
            mapped = mmap.mmap(file.fileno(), 0)
        return np.frombuffer(mapped, offset=len(head))

    def _create(self, path: Path, content: bytes) -> None:
        """Others may be reading the folder: a file appears when it is complete."""
        unfinished = path.with_suffix(".new")
        try:
            unfinished.write_bytes(content)
            unfinished.rename(path)
        except OSError:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def _path(self, key: Key) -> Path:
        return self._folder / f"{self._worker}-{_name(key)}{SUFFIX}"

    def _names(self, part: str) -> list[str]:
        try:
            found = [path.name for path in self._folder.iterdir()]
        except FileNotFoundError:  # the supervisor has gone, and this worker is about to
            return []
        return [name for name in found if name.endswith(part + SUFFIX)]

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            logger.error(
                "Worker %d counts something for itself, since there is no room in %s (%s): other "
                "workers' /metrics will lack it.",
                self._worker,
                self._folder,
                error.strerror,
            )


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
