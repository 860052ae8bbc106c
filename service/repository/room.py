"""Admits versions to be loaded while there is memory for them.

A process that takes more than its container may have is killed, together with the versions that it
served. So what loading will take is compared with what is left, before anything large is read.
"""

import fcntl
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import ceil, floor
from pathlib import Path
from time import time

from service.errors import NoRoom
from service.repository.load_memory import LoadBytes
from service.system import memory

logger = logging.getLogger(__name__)

BytesLeft = Callable[[], int | None]
RESERVED_SECONDS = 120.0  # how long the other workers may take to load what one of them may


class Room(ABC):
    @abstractmethod
    def admit(self, checksum: str, needed: LoadBytes) -> None:
        """Raises NoRoom if a bundle cannot be loaded now."""

    @abstractmethod
    def finished(self, checksum: str) -> None:
        """This process has loaded the bundle, or failed to."""

    @contextmanager
    def admitted(self, checksum: str, needed: LoadBytes) -> Iterator[None]:
        self.admit(checksum, needed)
        try:
            yield
        finally:
            self.finished(checksum)


class Unchecked(Room):
    """Admits everything."""

    def admit(self, checksum: str, needed: LoadBytes) -> None:
        pass

    def finished(self, checksum: str) -> None:
        pass


UNCHECKED = Unchecked()


class LocalRoom(Room):
    """Of a server that is one process."""

    def __init__(self, bytes_left: BytesLeft = memory.bytes_left) -> None:
        self._bytes_left = bytes_left

    def admit(self, checksum: str, needed: LoadBytes) -> None:
        del checksum
        check_room(needed.of(1), 1, self._bytes_left())

    def finished(self, checksum: str) -> None:
        pass


@dataclass
class Admission:
    """A bundle that workers may load."""

    shared: int
    private: int
    granted: int  # workers that may
    until: float  # when those that have not begun need no more room
    begun: list[int] = field(default_factory=list)  # processes
    ended: list[int] = field(default_factory=list)

    def forget_dead(self) -> None:
        dead = [process for process in self.begun if not _is_alive(process)]
        self.granted -= len(dead)
        self.begun = [process for process in self.begun if process not in dead]
        self.ended = [process for process in self.ended if process not in dead]

    def reserved(self) -> int:
        """What workers that were admitted have yet to take, at most."""
        coming = self.granted if time() < self.until else len(self.begun)
        shared = 0 if self.ended else self.shared
        return shared * (coming > 0) + self.private * max(0, coming - len(self.ended))


class SharedRoom(Room):
    """Of several workers: the first that asks is answered for all, so that all load or none.

    `folder` belongs to the workers of one server.
    """

    def __init__(
        self, folder: Path, workers: int, bytes_left: BytesLeft = memory.bytes_left
    ) -> None:
        self._file = folder / "room.json"
        self._lock = folder / "room.lock"
        self._workers = workers
        self._bytes_left = bytes_left

    def admit(self, checksum: str, needed: LoadBytes) -> None:
        process = os.getpid()
        with self._admissions() as admissions:
            mine = admissions.get(checksum)
            if mine is None:
                mine = Admission(needed.shared, needed.private, 0, 0.0)
            if process in mine.begun:  # it was loaded before, and unloaded
                mine.granted -= 1
                mine.begun.remove(process)
                mine.ended = [other for other in mine.ended if other != process]
            if len(mine.begun) >= mine.granted:
                joining = max(1, self._workers - mine.granted)
                shared = 0 if mine.ended else needed.shared
                reserved = sum(other.reserved() for other in admissions.values())
                left = self._bytes_left()
                wanted = shared + needed.private * joining
                check_room(wanted, joining, None if left is None else max(0, left - reserved))
                mine.granted += joining
                mine.until = time() + RESERVED_SECONDS
            mine.begun.append(process)
            admissions[checksum] = mine

    def finished(self, checksum: str) -> None:
        with self._admissions() as admissions:
            mine = admissions.get(checksum)
            if mine is not None and os.getpid() in mine.begun:
                mine.ended.append(os.getpid())

    @contextmanager
    def _admissions(self) -> Iterator[dict[str, Admission]]:
        """What was admitted, by checksum; changes are kept, and no other worker looks meanwhile."""
        try:
            lock = self._lock.open("w")
        except OSError:  # a full disk: each worker decides for itself
            logger.warning("The workers' folder cannot be written.", exc_info=True)
            yield {}
            return
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            admissions = self._read()
            for admission in admissions.values():
                admission.forget_dead()
            yield admissions
            self._write({name: one for name, one in admissions.items() if one.granted > 0})

    def _read(self) -> dict[str, Admission]:
        try:
            content = json.loads(self._file.read_bytes())
        except (OSError, ValueError):
            return {}
        return {checksum: Admission(**facts) for checksum, facts in content.items()}

    def _write(self, admissions: dict[str, Admission]) -> None:
        facts = {checksum: asdict(admission) for checksum, admission in admissions.items()}
        try:
            self._file.write_text(json.dumps(facts))
        except OSError:
            logger.warning("The workers' folder cannot be written.", exc_info=True)


def check_room(needed: int, workers: int, left: int | None) -> None:
    if left is not None and needed > left:
        within = f" in {workers} workers" if workers > 1 else ""
        raise NoRoom(
            f"Loading it needs {_size(needed, ceil)}{within}, and {_size(left, floor)} are left."
        )


def _size(count: int, rounded: Callable[[float], int]) -> str:
    """Rounded so that what is too little looks it."""
    if count < 1e9:
        return f"{rounded(count / 1e6)} MB"
    return f"{rounded(count / 1e8) / 10:.1f} GB"


def _is_alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists()
