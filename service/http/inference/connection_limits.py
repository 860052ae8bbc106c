"""Cuts off clients that keep the server waiting. All connections are looked at once a second, which
costs less than a timer for each of their steps."""

import asyncio
from collections.abc import Iterable
from typing import Protocol

LOOK_SECONDS = 1.0


class Timed(Protocol):
    def look(self, now: float) -> None:
        """End, if the client has taken too long; `now` is the event loop's time."""


class Sweeper:
    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, loop: asyncio.AbstractEventLoop, connections: Iterable[Timed]) -> None:
        """Go on looking at these as long as there are any."""
        if self._timer is None:
            self._timer = loop.call_later(LOOK_SECONDS, self._sweep, loop, connections)

    def _sweep(self, loop: asyncio.AbstractEventLoop, connections: Iterable[Timed]) -> None:
        self._timer = None
        now = loop.time()
        for connection in list(connections):
            connection.look(now)
        if connections:
            self.watch(loop, connections)


class Drain:
    """An answer that its client has not read yet: some of it must go in every while."""

    ENOUGH = 65_536  # bytes

    def __init__(self, now: float, size: int) -> None:
        self._since = now
        self._left = size

    def is_slow(self, now: float, size: int, seconds: float) -> bool:
        if size <= self._left - self.ENOUGH:
            self._since, self._left = now, size
        return now - self._since > seconds
