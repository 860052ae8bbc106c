"""Searches through a model: in a thread, one at a time, so that top-k requests hardly notice."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from service.errors import DSSError, Kind

T = TypeVar("T")

MOST_AT_ONCE = 16  # running or waiting for their turn


class TooManySearches(DSSError):
    """More searches are asked for than may wait."""

    kind = Kind.OVERLOADED


class Searches:
    """Runs one search at a time in a thread, and lets a few wait."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)
        self._running = 0

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        if self._running == MOST_AT_ONCE:
            raise TooManySearches("Many searches are running; try again soon.")
        self._running += 1
        try:
            async with self._turn:
                return await asyncio.to_thread(work, *arguments)
        finally:
            self._running -= 1
