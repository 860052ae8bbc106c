"""A file's bytes as they were when they were checked, whatever becomes of the file afterwards.

A mapped file changes when somebody overwrites it, and kills the process when somebody shortens it.
So a file is copied once into memory that nobody can change any more: an anonymous file, sealed
before its checksum is worked out. Workers of one server share a copy: each shows the others, in
their folder, under which descriptor it holds what.
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

# What has the bytes of a file, given its path, size and SHA-256.
Snapshot = Callable[[Path, int, str], memoryview]

CHUNK_BYTES = 2**22
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
SHOWN = re.compile(r"[0-9a-f]{64}\.(\d+)\.(\d+)")  # SHA-256, process, descriptor


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

    A copy lives as long as somebody maps it. It is found with any worker that is alive, so the
    one that made it may die.
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
            logger.warning("A copy cannot be shared with the other workers.", exc_info=True)
            return private_copy(file, size, sha256)
        with lock:
            # One worker copies and the others wait for it; the lock ends with its holder.
            fcntl.flock(lock, fcntl.LOCK_EX)
            descriptor = self._others(size, sha256)
            if descriptor is None:
                descriptor = _copied(file, size)
            shown = self._folder / f"{sha256}.{os.getpid()}.{descriptor}"
            content = _mapped_while_used(descriptor, size, shown)
            _check(content, sha256, file)
            _show(shown)
        return content

    def _others(self, size: int, sha256: str) -> int | None:
        """A descriptor of the copy that some live worker has."""
        for shown in self._folder.glob(f"{sha256}.*"):
            descriptor = _opened(shown, size)
            if descriptor is not None:
                return descriptor
            shown.unlink(missing_ok=True)  # its worker has died
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


def _mapped_while_used(descriptor: int, size: int, shown: Path) -> memoryview:
    """The descriptor is closed, and no longer shown, when nobody uses the bytes any more."""
    try:
        mapped = _mapped(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(mapped, _let_go, descriptor, shown).atexit = False
    return memoryview(mapped)


def _let_go(descriptor: int, shown: Path) -> None:
    shown.unlink(missing_ok=True)
    os.close(descriptor)


def _show(shown: Path) -> None:
    try:
        shown.touch()
    except OSError:  # a full disk; the others make a copy of their own
        logger.warning("A copy cannot be shown to the other workers.", exc_info=True)


def _opened(shown: Path, size: int) -> int | None:
    """What another worker shows, if it is what it should be."""
    match = SHOWN.fullmatch(shown.name)
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
    except OSError:  # not memory at all: the worker's number is another process's now
        pass
    os.close(descriptor)
    return None


def _check(content: memoryview, sha256: str, file: Path) -> None:
    if hashlib.sha256(content).hexdigest() != sha256:
        raise errors.ChecksumWrong(f"{_name(file)} does not match its checksum.")


def _name(file: Path) -> str:
    """As a bundle's manifest has it."""
    return "/".join(file.parts[-2:])
