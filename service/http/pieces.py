"""Long work of the event loop, done in pieces: one piece a turn, and others are answered between.

A thread would not help: the JSON parser holds the interpreter's lock from begin to end. What is
short goes first. What would have to wait too long is refused before it is begun.
"""

import asyncio
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from time import perf_counter
from typing import Any, TypeVar

from service.errors import DSSError, Kind
from service.topk import DeadlineExceeded

T = TypeVar("T")
Pieces = Generator[None, None, T]  # what returns the outcome, and yields between two pieces

PIECE_BYTES = 32_768  # take a fraction of a millisecond
SECONDS_PER_BYTE = 1e-8  # before any work was timed
LEARNED = 0.2  # the share of the newest work in what is known


class TooMuchToDecode(DSSError):
    """As many large bodies wait to be decoded as may."""

    kind = Kind.OVERLOADED


def at_once(pieces: Pieces[T]) -> T:
    """For work that is short: all its pieces in this turn."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            outcome: T = end.value
            return outcome


@dataclass(order=True)
class Work:
    size: int  # bytes, about
    number: int  # of equal ones the first comes first
    pieces: Pieces[Any] = field(compare=False)
    future: "asyncio.Future[Any]" = field(compare=False)
    deadline: float = field(compare=False)
    seconds: float = field(compare=False, default=0.0)  # that its pieces have taken


class PieceQueue:
    def __init__(self, max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._waiting: list[Work] = []  # a heap
        self._number = 0
        self._seconds_per_byte = SECONDS_PER_BYTE
        self._runs = False

    def admit(self, size: int) -> None:
        """Refuses work of so many bytes if too much is before it."""
        before = sum(work.size for work in self._waiting if work.size <= size)
        if before * self._seconds_per_byte > self._max_seconds:
            raise TooMuchToDecode("Many large bodies wait to be decoded; try again soon.")

    def run(self, pieces: Pieces[T], size: int, deadline: float) -> "asyncio.Future[T]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._number += 1
        heappush(self._waiting, Work(size, self._number, pieces, future, deadline))
        if not self._runs:
            self._runs = True
            loop.call_soon(self._next_piece, loop)
        return future

    def _next_piece(self, loop: asyncio.AbstractEventLoop) -> None:
        work = self._waiting[0]
        if self._is_over(work):
            self._forget(work)
        self._runs = bool(self._waiting)
        if self._runs:
            loop.call_soon(self._next_piece, loop)

    def _is_over(self, work: Work) -> bool:
        """Does a piece of it, unless nobody waits for it any more."""
        future, started = work.future, perf_counter()
        if future.done():
            work.pieces.close()
            return True
        if started > work.deadline:
            work.pieces.close()
            future.set_exception(DeadlineExceeded("The answer could not be given in time."))
            return True
        try:
            next(work.pieces)
        except StopIteration as end:
            future.set_result(end.value)
        except Exception as error:
            future.set_exception(error)
        work.seconds += perf_counter() - started
        return future.done()

    def _forget(self, work: Work) -> None:
        if self._waiting[0] is work:
            heappop(self._waiting)
        else:  # a shorter one has come meanwhile
            with suppress(ValueError):
                self._waiting.remove(work)
            heapify(self._waiting)
        if work.seconds:
            newest = work.seconds / max(work.size, PIECE_BYTES)
            self._seconds_per_byte += LEARNED * (newest - self._seconds_per_byte)
