"""Counters that all workers can read: blocks of float64, one block for each set of labels.

A block has one writer, so counting needs no lock: blocks of HTTP metrics are written by the event
loop, a model's block by the call of its engine, of which there is one at a time. Every worker may
read every block. A counter is read whole, but two counters of a block may be one event apart.

Several workers share a folder with one file for each block of each worker. A file starts with one
line of JSON, the block's key; the counters follow. A worker that replaces a dead one continues in
its files, so counts never decrease. A counter is written by one store of eight aligned bytes, so
a worker killed at any moment leaves each counter either as before or as after.
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

COUNTER_BYTES = 8
SUFFIX = ".counters"


class Block(NamedTuple):
    worker: int
    key: Key
    values: Values


class Counters(ABC):
    @abstractmethod
    def block(self, key: Key, size: int) -> Values:
        """This process's own block for a key, created by the first call."""

    @abstractmethod
    def blocks(self, key: Key | None = None) -> Iterator[Block]:
        """The blocks of all workers, to be read; of one key or of all keys."""

    @abstractmethod
    def drop(self, key: Key) -> None:
        """Remove this process's own block for a key, once nothing counts there any more."""


class LocalCounters(Counters):
    """The counters of a server that is one process."""

    def __init__(self) -> None:
        self._own: dict[Key, Values] = {}

    def block(self, key: Key, size: int) -> Values:
        return self._own.setdefault(key, np.zeros(size))

    def blocks(self, key: Key | None = None) -> Iterator[Block]:
        for own in list(self._own) if key is None else [key]:
            values = self._own.get(own)
            if values is not None:
                yield Block(0, own, values)

    def drop(self, key: Key) -> None:
        self._own.pop(key, None)


class SharedCounters(Counters):
    """The counters of one of several workers; `folder` belongs to the workers of one server.

    If it is told how many workers there are, the blocks of one key are found without listing the
    folder, which has some files for each version of each model.
    """

    def __init__(self, folder: Path, worker: int, workers: int | None = None) -> None:
        self._folder = folder
        self._worker = worker
        self._workers = workers
        self._own: dict[Key, Values] = {}
        self._unshared: dict[Key, Values] = {}  # own blocks that the folder had no room for
        self._logged_no_room = False

    def block(self, key: Key, size: int) -> Values:
        if key not in self._own:
            try:
                self._own[key] = self._open(key, size)
            except OSError as error:
                self._log_no_room(error)
                self._own[key] = self._unshared[key] = np.zeros(size)
        return self._own[key]

    def blocks(self, key: Key | None = None) -> Iterator[Block]:
        for name in self._names(key):
            with suppress(FileNotFoundError):  # its worker has just dropped it
                line, _, stored = (self._folder / name).read_bytes().partition(b"\n")
                worker = int(name.partition("-")[0])
                yield Block(worker, tuple(json.loads(line)), np.frombuffer(stored))
        for own, values in list(self._unshared.items()):
            if key in (None, own):
                yield Block(self._worker, own, values)

    def drop(self, key: Key) -> None:
        self._own.pop(key, None)
        if self._unshared.pop(key, None) is None:
            self._path(key).unlink(missing_ok=True)

    def _open(self, key: Key, size: int) -> Values:
        header, path = _header(key), self._path(key)
        length = len(header) + size * COUNTER_BYTES
        if not path.exists():
            self._create(path, header.ljust(length, b"\0"))
        with path.open("r+b") as file:
            # The dead worker's bundle may have had fewer experts. Space is reserved now: writing to
            # a mapped page that the disk then has no room for would kill the process.
            os.posix_fallocate(file.fileno(), 0, length)
            mapped = mmap.mmap(file.fileno(), 0)
        return np.frombuffer(mapped, offset=len(header))

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
        return self._folder / _name(self._worker, key)

    def _names(self, key: Key | None) -> list[str]:
        """Of files with the blocks of one key or of all keys; some may not be there."""
        if key is not None and self._workers is not None:
            return [_name(worker, key) for worker in range(self._workers)]
        ending = SUFFIX if key is None else _hashed(key) + SUFFIX
        try:
            found = [path.name for path in self._folder.iterdir()]
        except FileNotFoundError:  # the supervisor has ended, and this worker is about to
            return []
        return sorted(name for name in found if name.endswith(ending))

    def _log_no_room(self, error: OSError) -> None:
        if not self._logged_no_room:
            self._logged_no_room = True
            logger.error(
                "Worker %d keeps some counters to itself, since there is no room in %s (%s): "
                "/metrics of other workers will lack them.",
                self._worker,
                self._folder,
                error.strerror,
            )


def _header(key: Key) -> bytes:
    """One line, padded so that the counters after it are aligned."""
    line = json.dumps(key).encode()
    padding = -(len(line) + 1) % COUNTER_BYTES
    return line + b" " * padding + b"\n"


def _name(worker: int, key: Key) -> str:
    return f"{worker}-{_hashed(key)}{SUFFIX}"


def _hashed(key: Key) -> str:
    """The same for a key in every worker; labels may hold what a file name may not."""
    return hashlib.sha256(_header(key)).hexdigest()[:16]


def totals(blocks: Iterable[Block]) -> dict[Key, Values]:
    """The sums over workers, by key; as long as the longest block where lengths differ."""
    found: dict[Key, Values] = {}
    for _, key, values in blocks:
        have = found.get(key)
        if have is None:
            found[key] = values.copy()
        elif len(have) < len(values):
            found[key] = values.copy()
            found[key][: len(have)] += have
        else:
            have[: len(values)] += values
    return found
