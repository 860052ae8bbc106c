"""The folder in which workers keep their counts: in memory if it can be, and theirs alone.

Memory, because a disk may be full, slow or read-only, and counting must not care. Files in memory
rather than memory that processes inherit, because a worker that is started later finds them by
their names, and what has been counted outlives the one who counted.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from service.errors import NotStarted

MEMORY = Path("/dev/shm")  # noqa: S108
PREFIX = "dss-"
ROOM_BYTES = 2**20  # there must be so much at the start
LOCK = "lock"  # held by the supervisor: what nobody holds was left behind


@contextmanager
def made(asked: Path | None) -> Iterator[Path]:
    """A new folder, gone at the end. What supervisors that were killed have left goes as well."""
    temporary = Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108
    places = [asked] if asked is not None else [MEMORY, temporary]
    folder = _first(places)
    try:
        with (folder / f"{LOCK}.new").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(lock.name).rename(folder / LOCK)  # seen by others once it is held
            sweep(folder.parent)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _first(places: Sequence[Path]) -> Path:
    """A folder in the first place that has room."""
    reasons = []
    for place in places:
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        except OSError as error:
            reasons.append(f"{place} ({error.strerror})")
            continue
        try:
            _try(folder / "room")
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            reasons.append(f"{place} ({error.strerror})")
        else:
            return folder
    raise NotStarted(f"Workers cannot keep their counts in {' nor in '.join(reasons)}.")


def _try(file: Path) -> None:
    with file.open("wb") as room:
        os.posix_fallocate(room.fileno(), 0, ROOM_BYTES)
    file.unlink()


def sweep(place: Path) -> None:
    """Remove folders of supervisors that have ended without doing so."""
    for lock in place.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), lock.open("rb") as held:  # somebody else's, or just gone
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
