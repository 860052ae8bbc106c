"""Where machine code is kept: beside the source, or else in the user's cache.

numba would notice a change of the file that a function is in, but not of the files it calls into.
And it would pass over a folder that it cannot write to, as in a read-only image, although what it
needs is there. So the folder is named for everything that machine code depends on.
"""

import hashlib
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite.binding
import numba
from numba.core import config as numba_config
from numba.core.caching import UserProvidedCacheLocator

config: Any = numba_config

FOLDER = Path(__file__).parent
SERVICE = FOLDER.parent.parent
# Constants of the last two are part of the machine code.
SOURCES = (
    *sorted(FOLDER.glob("*.py")),
    SERVICE / "topk.py",
    SERVICE / "bundle/quantisation.py",
)


class Locator(UserProvidedCacheLocator):
    """How numba asks."""

    def __init__(self, function: FunctionType, file: str) -> None:
        self._py_file, self._lineno = file, function.__code__.co_firstlineno
        self._cache_path = str(folder())

    def get_source_stamp(self) -> str:
        return fingerprint()

    @classmethod
    def from_function(cls, function: FunctionType, file: str) -> "Locator | None":
        return None if folder() is None else cls(function, file)


@contextmanager
def in_use() -> Iterator[None]:
    """numba is told by a setting of its own, which is put back for everyone else."""
    before = config.CACHE_LOCATOR_CLASSES
    config.CACHE_LOCATOR_CLASSES = f"{__name__}.{Locator.__name__}"
    try:
        yield
    finally:
        config.CACHE_LOCATOR_CLASSES = before


@cache
def folder() -> Path | None:
    """The first that has machine code for this processor, or into which it can be written."""
    users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    given = config.CACHE_DIR
    for place in [given] if given else [FOLDER / "__pycache__", Path(users)]:
        found = Path(place) / f"dss-{fingerprint()[:16]}"
        if any(found.glob("*.nbc")) or _can_be_written(found):
            return found
    return None


def _can_be_written(path: Path) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        return False
    return True


@cache
def fingerprint() -> str:
    """Of the sources, the compiler and the processor."""
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update(source.read_bytes())
    features = llvmlite.binding.get_host_cpu_features().flatten()
    about = (numba.__version__, platform.python_version(), llvmlite.binding.get_host_cpu_name())
    digest.update("\n".join((*about, features, os.name)).encode())
    return digest.hexdigest()
