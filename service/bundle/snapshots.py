"""Copies large files into sealed memory, so that what was checked is what answers.

A mapped file changes when it is overwritten, and kills the process when it is shortened. So a file
is copied once into an anonymous file (memfd), which is sealed against changes before its checksum
is computed. Workers of one server share a copy: each announces in their common folder which file it
holds under which descriptor.
"""

import fcntl
import hashlib
import logging
import mmap
import os
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from service import errors

logger = logging.getLogger(__name__)

# Returns the bytes of a file, given its path, size and SHA-256.
Snapshot = Callable[[Path, int, str], memoryview]

CHUNK_BYTES = 2**22
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
ANNOUNCED = re.compile(r"[0-9a-f]{64}\.(\d+)\.(\d+)")  # SHA-256, process, descriptor


def private_copy(file: Path, size: int, sha256: str) -> memoryview:
    """A copy for this process alone."""
    if not size:
        return memoryview(b"")
    descriptor = _copied(file, size)
    try:
        content = memoryview(_mapped(descriptor, size))
    finally:
        os.close(descriptor)
    _check(content, sha256, file)
    return content


class SharedSnapshots:
    """Copies that the workers of one server have in common; `folder` is theirs alone.

    A copy exists as long as some worker maps it. Any worker that maps it announces it, so the
    worker that made it may exit.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with suppress(OSError):
            self._folder.mkdir(exist_ok=True)

    def __call__(self, file: Path, size: int, sha256: str) -> memoryview:
        if not size:
            return memoryview(b"")
        try:
            lock = (self._folder / f"lock-{sha256[0]}").open("w")
        except OSError:  # a full disk
            logger.warning(
                "The workers' folder cannot be written; this worker makes a copy of its own.",
                exc_info=True,
            )
            return private_copy(file, size, sha256)
        with lock:
            # One worker copies and the others wait for it; the lock ends with its holder.
            fcntl.flock(lock, fcntl.LOCK_EX)
            descriptor = self._others(size, sha256)
            if descriptor is None:
                descriptor = _copied(file, size)
            announced = self._folder / f"{sha256}.{os.getpid()}.{descriptor}"
            content = _mapped_and_announced(descriptor, size, announced)
            _check(content, sha256, file)
            _announce(announced)
        return content

    def _others(self, size: int, sha256: str) -> int | None:
        """A descriptor of the copy that some live worker has."""
        for announced in self._folder.glob(f"{sha256}.*"):
            descriptor = _open_announced(announced, size)
            if descriptor is not None:
                return descriptor
            announced.unlink(missing_ok=True)  # its worker is gone
        return None


def _copied(file: Path, size: int) -> int:
    """A sealed copy of a file's first bytes."""
    descriptor = os.memfd_create(file.name[:64], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _copy(file, descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _copy(file: Path, descriptor: int, size: int) -> None:
    left = size
    try:
        with file.open("rb", buffering=0) as stream:
            while left and (piece := stream.read(min(left, CHUNK_BYTES))):
                left -= len(piece)
                _write(descriptor, piece)
    except OSError as error:
        raise errors.FileUnreadable(f"{_name(file)} cannot be copied: {error.strerror}.") from error
    if left:
        raise errors.FileSizeWrong(f"{_name(file)} became shorter while it was read.")


def _write(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    # Private, because older kernels refuse to share what is sealed against writing; pages that
    # nobody writes are shared all the same.
    return mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)


def _mapped_and_announced(descriptor: int, size: int, announced: Path) -> memoryview:
    """Maps a copy; once its bytes are no longer used, closes it and ends the announcement."""
    try:
        mapped = _mapped(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(mapped, _withdraw, descriptor, announced).atexit = False
    return memoryview(mapped)


def _withdraw(descriptor: int, announced: Path) -> None:
    announced.unlink(missing_ok=True)
    os.close(descriptor)


def _announce(announced: Path) -> None:
    try:
        announced.touch()
    except OSError:  # a full disk; the others make a copy of their own
        logger.warning(
            "The workers' folder cannot be written; other workers make copies of their own.",
            exc_info=True,
        )


def _open_announced(announced: Path, size: int) -> int | None:
    """The descriptor that another worker announces, if it is sealed and of the right size."""
    match = ANNOUNCED.fullmatch(announced.name)
    if match is None:
        return None
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(f"/proc/{match[1]}/fd/{match[2]}", flags)
    except OSError:
        return None
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
        if sealed and os.fstat(descriptor).st_size == size:
            return descriptor
    except OSError:  # not a memfd: the worker is gone and its number belongs to another process
        pass
    os.close(descriptor)
    return None


def _check(content: memoryview, sha256: str, file: Path) -> None:
    if hashlib.sha256(content).hexdigest() != sha256:
        raise errors.ChecksumWrong(f"{_name(file)} does not match its checksum.")


def _name(file: Path) -> str:
    """As a bundle's manifest has it."""
    return "/".join(file.parts[-2:])
