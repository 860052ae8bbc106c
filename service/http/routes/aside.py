"""Longer work in a thread, one at a time, so that top-k requests hardly notice it."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from service.errors import DSSError, Kind

T = TypeVar("T")

MOST_PRESENT = 16  # at work or waiting for their turn


class TooManySearches(DSSError):
    """More want to look through the models than the server lets wait."""

    kind = Kind.OVERLOADED


class Aside:
    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)
        self._present = 0

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        if self._present == MOST_PRESENT:
            raise TooManySearches("Many others are looking through the models; try again soon.")
        self._present += 1
        try:
            async with self._turn:
                return await asyncio.to_thread(work, *arguments)
        finally:
            self._present -= 1
