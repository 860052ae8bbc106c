"""What is looked at once a second while the server runs: files that may be replaced, counts."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

SECONDS = 1.0

Stamp = tuple[int, int, int] | None


class FileWatch:
    """Notices that a file is not what it was: links are followed, as Kubernetes' mounts need."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._stamps = self._look()

    def changed(self) -> bool:
        """Since it was last asked."""
        before, self._stamps = self._stamps, self._look()
        return self._stamps != before

    def _look(self) -> list[Stamp]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


async def every_second(refresh: Callable[[], Awaitable[None]]) -> None:
    """Look once a second. Whatever happens, the next look comes."""
    while True:
        await asyncio.sleep(SECONDS)
        try:
            await refresh()
        except Exception:
            logger.exception("Looking for changes failed.")
