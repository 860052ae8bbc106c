"""Creates the folder in which workers share their counters: in memory if possible.

In memory, because a disk may be full, slow or read-only, and counting must not depend on it. Files
rather than inherited memory, because a worker that starts later finds them by name, and counters
outlive the worker that wrote them.
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
REQUIRED_BYTES = 2**20  # free at the start
LOCK = "lock"  # held by the supervisor: a folder whose lock is free was left behind


@contextmanager
def temporary(parent: Path | None) -> Iterator[Path]:
    """A new folder, removed at the end. Folders left by killed supervisors are removed as well."""
    on_disk = Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108
    folder = _create([parent] if parent is not None else [MEMORY, on_disk])
    try:
        with (folder / f"{LOCK}.new").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(lock.name).rename(folder / LOCK)  # other supervisors see it only once it is held
            remove_abandoned(folder.parent)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _create(parents: Sequence[Path]) -> Path:
    """A new folder in the first of these that has room."""
    reasons = []
    for parent in parents:
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        except OSError as error:
            reasons.append(f"{parent} ({error.strerror})")
            continue
        try:
            _reserve(folder / "room")
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            reasons.append(f"{parent} ({error.strerror})")
        else:
            return folder
    raise NotStarted(f"Workers cannot keep their counts in {' nor in '.join(reasons)}.")


def _reserve(file: Path) -> None:
    """Raises OSError if there is not enough room."""
    with file.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, REQUIRED_BYTES)
    file.unlink()


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of supervisors that ended without removing theirs."""
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), lock.open("rb") as held:  # another user's, or just removed
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
