"""Notices changed files, and calls a function once a second while the server runs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

SECONDS = 1.0

Stamp = tuple[int, int, int] | None


class FileWatch:
    """Notices that a file was changed or replaced; follows links, as Kubernetes' mounts need."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._stamps = self._read_stamps()

    def changed(self) -> bool:
        """Whether any file has changed since the last call."""
        before, self._stamps = self._stamps, self._read_stamps()
        return self._stamps != before

    def _read_stamps(self) -> list[Stamp]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


async def every_second(refresh: Callable[[], Awaitable[None]]) -> None:
    """Call `refresh` once a second. If it fails, that is logged and the next call comes."""
    while True:
        await asyncio.sleep(SECONDS)
        try:
            await refresh()
        except Exception:
            logger.exception("A check for changes failed; the next one comes in a second.")
