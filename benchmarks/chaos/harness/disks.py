"""Small disks in memory, for scenarios in which the disk is what fails."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.chaos.harness.verdict import NotPossible

CHUNK = bytes(2**16)


@contextmanager
def disk(path: Path, mib: int) -> Iterator[Path]:
    """A file system of its own."""
    path.mkdir(parents=True)
    with _mounted(path, "-t", "tmpfs", "-o", f"size={mib}m", "chaos"):
        yield path


@contextmanager
def read_only(source: Path, path: Path) -> Iterator[Path]:
    """The same folder, where nothing can be written."""
    path.mkdir(parents=True)
    with _mounted(path, "--bind", str(source)):
        _run("mount", "-o", "remount,ro,bind", str(path))
        yield path


@contextmanager
def _mounted(path: Path, *arguments: str) -> Iterator[None]:
    if os.geteuid() != 0:
        raise NotPossible("Only root can mount a disk.")
    _run("mount", *arguments, str(path))
    try:
        yield
    finally:
        with suppress(NotPossible):
            _run("umount", "--lazy", str(path))


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise NotPossible(f"A disk cannot be mounted here: {said.strip()}") from error


def fill(path: Path) -> Path:
    """A file that takes all the room there is."""
    file = path / "filler"
    with suppress(OSError), file.open("wb", buffering=0) as stream:
        while True:
            stream.write(CHUNK)
    with suppress(OSError), file.open("ab", buffering=0) as stream:
        while True:
            stream.write(b"\0")
    return file
