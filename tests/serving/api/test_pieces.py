"""Long work of the event loop, a piece each turn."""

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter

import pytest

from service.http.pieces import PieceQueue, Pieces, TooMuchToDecode, at_once
from service.topk import DeadlineExceeded

NEVER = float("inf")
SHORT, LONG = 100, 1000


def work(name: str, count: int, done: list[str]) -> Pieces[str]:
    try:
        for _ in range(count):
            done.append(name)
            yield
    finally:
        done.append(f"{name} ends")
    return name


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(limited())


def test_others_run_between_two_pieces() -> None:
    async def scenario() -> None:
        queue, done = PieceQueue(1.0), list[str]()
        future = queue.run(work("a", 3, done), LONG, NEVER)
        while not future.done():
            done.append("turn")
            await asyncio.sleep(0)
        assert future.result() == "a"
        assert done == ["turn", "a", "turn", "a", "turn", "a", "turn", "a ends"]

    run(scenario)


def test_the_shorter_goes_first() -> None:
    async def scenario() -> None:
        queue, done = PieceQueue(1.0), list[str]()
        long = queue.run(work("long", 3, done), LONG, NEVER)
        await asyncio.sleep(0)
        short = queue.run(work("short", 2, done), SHORT, NEVER)
        await asyncio.gather(long, short)
        assert done == ["long", "short", "short", "short ends", "long", "long", "long ends"]

    run(scenario)


def test_what_nobody_waits_for_is_not_done() -> None:
    async def scenario() -> None:
        queue, done = PieceQueue(1.0), list[str]()
        left = queue.run(work("left", 3, done), SHORT, NEVER)
        late = queue.run(work("late", 3, done), LONG, perf_counter() - 1.0)
        kept = queue.run(work("kept", 1, done), LONG, NEVER)
        left.cancel()
        with pytest.raises(DeadlineExceeded):
            await late
        assert await kept == "kept"
        assert done == ["kept", "kept ends"]

    run(scenario)


def test_work_that_fails_fails_alone() -> None:
    async def scenario() -> None:
        queue = PieceQueue(1.0)

        def failing() -> Pieces[None]:
            yield
            raise ValueError("no")

        first = queue.run(failing(), SHORT, NEVER)
        second = queue.run(work("b", 2, []), LONG, NEVER)
        with pytest.raises(ValueError, match="no"):
            await first
        assert await second == "b"

    run(scenario)


def test_what_would_wait_too_long_is_refused() -> None:
    async def scenario() -> None:
        queue = PieceQueue(max_seconds=1.0)
        queue._seconds_per_byte = 1.0
        queue.admit(LONG)  # however long it is itself, if nothing is before it
        waiting = queue.run(work("a", 1, []), LONG, NEVER)
        with pytest.raises(TooMuchToDecode):
            queue.admit(LONG)
        queue.admit(SHORT)  # would go first
        await waiting
        queue.admit(LONG)

    run(scenario)


def test_how_long_work_takes_is_learned() -> None:
    async def scenario() -> None:
        queue = PieceQueue(1.0)
        queue._seconds_per_byte = 1.0
        for _ in range(100):
            await queue.run(work("a", 1, []), 10**6, NEVER)
        assert queue._seconds_per_byte < 1e-3

    run(scenario)


def test_short_work_is_done_at_once() -> None:
    done: list[str] = []
    assert at_once(work("a", 3, done)) == "a"
    assert len(done) == 4
