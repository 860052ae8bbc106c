"""Builds the page of /metrics beside the event loop, one page at a time.

Requests that come while a page is built share the next one: they never get counts from before they
asked, and any number of them costs one page. Pages are built in a small share of the time, so that
who asks again and again waits, and not everybody else.
"""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

SHARE = 0.2  # of the time, at most, is spent on building pages
# The event loop needs the interpreter's lock, which another thread gives back after so long.
SWITCH_SECONDS = 0.0005


class MetricsPage:
    """Only the event loop may use it."""

    def __init__(self, build: Callable[[], bytes]) -> None:
        self._build = build
        self._building = asyncio.Lock()
        self._not_before = 0.0
        self._next: asyncio.Task[bytes] | None = None  # a page that is not begun

    async def get(self) -> bytes:
        if self._next is None:
            self._next = asyncio.create_task(self._build_next())
        # Others may wait for it too, so a client that leaves does not end it.
        return await asyncio.shield(self._next)

    async def _build_next(self) -> bytes:
        async with self._building:
            try:
                await asyncio.sleep(self._not_before - monotonic())
            finally:
                self._next = None  # who asks from now on wants what is counted from now on
            begun = monotonic()
            try:
                return await asyncio.to_thread(self._in_thread)
            finally:
                ended = monotonic()
                self._not_before = ended + (ended - begun) * (1 / SHARE - 1)

    def _in_thread(self) -> bytes:
        with _switching_often():
            return self._build()


@contextmanager
def _switching_often() -> Iterator[None]:
    """Of all threads, but only those that wait for the interpreter notice it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
