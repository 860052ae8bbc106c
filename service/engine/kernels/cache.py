"""Where machine code is cached: beside the source, or else in the user's cache folder.

numba by itself notices a change of the file that a function is in, but not of the files it calls
into, and it skips a folder that it cannot write to, as in a read-only image, even if the machine
code is there. So the folder is named by a hash of everything that machine code depends on.
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
# Constants of the last ones become part of the machine code.
SOURCES = (
    *sorted(FOLDER.rglob("*.py")),
    SERVICE / "topk.py",
    SERVICE / "bundle/quantisation.py",
    SERVICE / "bundle/contract.py",
)


class Locator(UserProvidedCacheLocator):
    """Tells numba to use `folder`, and to trust what it finds there."""

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
    """Sets numba's own setting while a function is compiled, and resets it for other users."""
    before = config.CACHE_LOCATOR_CLASSES
    config.CACHE_LOCATOR_CLASSES = f"{__name__}.{Locator.__name__}"
    try:
        yield
    finally:
        config.CACHE_LOCATOR_CLASSES = before


@cache
def folder() -> Path | None:
    """The first folder that has machine code for this processor or can be written to."""
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
    """A hash of the sources, the compiler and the processor."""
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update(source.read_bytes())
    features = llvmlite.binding.get_host_cpu_features().flatten()
    about = (numba.__version__, platform.python_version(), llvmlite.binding.get_host_cpu_name())
    digest.update("\n".join((*about, features, os.name)).encode())
    return digest.hexdigest()
