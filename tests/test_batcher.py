import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from fakes import FakeEngine, Recorder
from numpy.typing import NDArray
from tiny import rows_for

from service.batcher import (
    INLINE_SECONDS,
    KINDS_KEPT,
    Answered,
    Batcher,
    EngineFailed,
    EngineStopped,
    QueueFull,
)
from service.engine import Engine
from service.errors import KOutOfRange, WrongWidth

Request = tuple[NDArray[np.float32], int, int]


def rows(*values: float) -> NDArray[np.float32]:
    return np.array([[value, 0.0] for value in values], np.float32)


@asynccontextmanager
async def batching(
    engine: FakeEngine | Engine,
    recorder: Recorder | None = None,
    max_queue_rows: int = 100,
    max_batch_rows: int = 100,
    inline_seconds: float = INLINE_SECONDS,
) -> AsyncIterator[Batcher]:
    batcher = Batcher(
        engine,
        name="fake/1",
        max_queue_rows=max_queue_rows,
        max_batch_rows=max_batch_rows,
        observer=recorder or Recorder(),
        inline_seconds=inline_seconds,
    )
    try:
        yield batcher
    finally:
        await batcher.close()


async def hold_first(batcher: Batcher, engine: FakeEngine) -> "asyncio.Task[Answered]":
    """Occupy the engine with a request of its own, so that the next ones must queue."""
    engine.hold()
    first = asyncio.create_task(batcher.topk(rows(1000), 1))
    await asyncio.to_thread(engine.entered.wait)
    return first


async def queue(batcher: Batcher, requests: Iterable[Request]) -> list["asyncio.Task[Answered]"]:
    tasks = [asyncio.create_task(batcher.topk(*request)) for request in requests]
    await asyncio.sleep(0)  # each task runs up to its wait
    return tasks


def test_an_idle_engine_runs_a_request_alone() -> None:
    async def scenario() -> None:
        engine, recorder = FakeEngine(), Recorder()
        async with batching(engine, recorder) as batcher:
            answer = await batcher.topk(rows(3, 7), 2)
        assert answer.classes.tolist() == [[3, 4], [7, 8]]
        assert engine.calls == [(2, 2, 1)]
        assert recorder.executions == [(1, 2)]

    asyncio.run(scenario())


def test_requests_that_wait_are_joined_and_get_their_own_answers() -> None:
    async def scenario() -> None:
        engine, recorder = FakeEngine(), Recorder()
        async with batching(engine, recorder) as batcher:
            first = await hold_first(batcher, engine)
            tasks = await queue(batcher, [(rows(i, i + 50), 3, 1) for i in range(8)])
            assert batcher.queued_rows == 16
            engine.release.set()
            for i, answer in enumerate(await asyncio.gather(*tasks)):
                assert answer.classes.tolist() == [[i, i + 1, i + 2], [i + 50, i + 51, i + 52]]
            await first
        assert engine.calls == [(1, 1, 1), (16, 3, 1)]
        assert recorder.executions == [(1, 1), (8, 16)]
        assert batcher.queued_rows == 0

    asyncio.run(scenario())


def test_only_equal_k_and_experts_are_joined_and_none_starves() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, max_batch_rows=2) as batcher:
            first = await hold_first(batcher, engine)
            requests = [(rows(i), 3, 1) for i in range(4)] + [(rows(9), 3, 2), (rows(8), 5, 1)]
            tasks = await queue(batcher, requests)
            engine.release.set()
            await asyncio.gather(first, *tasks)
        assert engine.calls[1:] == [(2, 3, 1), (1, 3, 2), (1, 5, 1), (2, 3, 1)]

    asyncio.run(scenario())


def test_a_request_larger_than_a_batch_runs_alone() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, max_batch_rows=2) as batcher:
            answer = await batcher.topk(rows(1, 2, 3, 4, 5), 1)
        assert answer.classes.tolist() == [[1], [2], [3], [4], [5]]

    asyncio.run(scenario())


def test_a_full_queue_refuses_at_once() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, max_queue_rows=3) as batcher:
            first = await hold_first(batcher, engine)
            (waiting,) = await queue(batcher, [(rows(1, 2), 1, 1)])
            with pytest.raises(QueueFull, match="2 rows waiting"):
                await batcher.topk(rows(3, 4), 1)
            (fits,) = await queue(batcher, [(rows(5), 1, 1)])
            engine.release.set()
            await asyncio.gather(first, waiting, fits)
            assert (await batcher.topk(rows(3, 4), 1)).classes.tolist() == [[3], [4]]

    asyncio.run(scenario())


def test_a_wrong_request_fails_alone() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine) as batcher:
            first = await hold_first(batcher, engine)
            wide = np.zeros((1, 3), np.float32)
            tasks = await queue(batcher, [(rows(1), 2, 1), (wide, 2, 1), (rows(2), 200, 1)])
            engine.release.set()
            await first
            good, wrong_width, wrong_k = await asyncio.gather(*tasks, return_exceptions=True)
        assert not isinstance(good, BaseException)
        assert good.classes.tolist() == [[1, 2]]
        assert isinstance(wrong_width, WrongWidth)
        assert isinstance(wrong_k, KOutOfRange)
        assert engine.calls == [(1, 1, 1), (1, 2, 1)]

    asyncio.run(scenario())


def test_a_failing_engine_fails_every_request_of_the_call_and_heals() -> None:
    async def scenario() -> None:
        engine, recorder = FakeEngine(), Recorder()
        async with batching(engine, recorder) as batcher:
            first = await hold_first(batcher, engine)
            tasks = await queue(batcher, [(rows(i), 2, 1) for i in range(3)])
            engine.failure = RuntimeError("secret")
            engine.release.set()
            outcomes = await asyncio.gather(first, *tasks, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [EngineFailed] * 4
            assert not any("secret" in str(outcome) for outcome in outcomes)
            assert not await batcher.healthy()
            assert batcher.alive
            engine.failure = None
            assert await batcher.healthy()
            assert (await batcher.topk(rows(4), 1)).classes.tolist() == [[4]]
        assert recorder.executions == [(1, 1)]  # neither failures nor checks are traffic

    asyncio.run(scenario())


def test_a_dead_thread_leaves_nobody_waiting() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine) as batcher:
            first = await hold_first(batcher, engine)
            tasks = await queue(batcher, [(rows(1), 2, 1), (rows(2), 3, 1)])
            engine.failure = SystemExit()
            engine.release.set()
            async with asyncio.timeout(30):
                outcomes = await asyncio.gather(first, *tasks, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [
                EngineFailed,
                EngineStopped,
                EngineStopped,
            ]
            await asyncio.to_thread(batcher._thread.join)
            assert not batcher.alive
            assert not await batcher.healthy()
            with pytest.raises(EngineStopped):
                await batcher.topk(rows(1), 1)

    asyncio.run(scenario())


def test_close_answers_what_waits_and_refuses_what_comes() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine) as batcher:
            first = await hold_first(batcher, engine)
            tasks = await queue(batcher, [(rows(1), 2, 1), (rows(2), 3, 1)])
            closing = asyncio.create_task(batcher.close())
            await asyncio.sleep(0)
            with pytest.raises(EngineStopped):
                await batcher.topk(rows(3), 1)
            engine.release.set()
            await closing
            answers = await asyncio.gather(first, *tasks)
        assert [answer.classes[0, 0] for answer in answers] == [1000, 1, 2]

    asyncio.run(scenario())


def test_a_request_that_was_given_up_is_not_computed() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine) as batcher:
            first = await hold_first(batcher, engine)
            gone, stays = await queue(batcher, [(rows(1), 2, 1), (rows(2), 2, 1)])
            gone.cancel()
            await asyncio.wait([gone])
            engine.release.set()
            assert (await stays).classes.tolist() == [[2, 3]]
            await first
        assert engine.calls == [(1, 1, 1), (1, 2, 1)]

    asyncio.run(scenario())


def test_an_answer_after_the_loop_has_closed_is_dropped() -> None:
    engine = FakeEngine()

    async def ask() -> Batcher:
        batcher = Batcher(
            engine, name="fake/1", max_queue_rows=9, max_batch_rows=9, observer=Recorder()
        )
        await hold_first(batcher, engine)
        return batcher

    batcher = asyncio.run(ask())
    engine.release.set()
    asyncio.run(batcher.close())
    assert not batcher.alive


@pytest.mark.parametrize("experts", [1, 2])
def test_joined_rows_are_answered_as_single_ones(tiny_engine: Engine, experts: int) -> None:
    """The real engine: batch mates change nothing, bit for bit in class ids."""
    rng = np.random.default_rng(0)
    singles = [rng.normal(size=(1, 4)).astype(np.float32) for _ in range(20)]
    singles += [rows_for(expert) for expert in (0, 1, 2)]

    async def scenario() -> tuple[list[Answered], list[tuple[int, int]]]:
        recorder = Recorder()
        async with batching(tiny_engine, recorder) as batcher:
            tasks = [batcher.topk(row, 7, experts) for row in singles]
            return await asyncio.gather(*tasks), recorder.executions

    answers, executions = asyncio.run(scenario())
    assert sum(requests for requests, _ in executions) == len(singles)
    assert len(executions) < len(singles)
    for row, answer in zip(singles, answers, strict=True):
        alone = tiny_engine.topk(row, 7, experts)
        assert answer.classes.tolist() == alone.classes.tolist()
        np.testing.assert_allclose(answer.log_probs, alone.log_probs, atol=1e-6)
        assert answer.experts.tolist() == alone.experts.tolist()


# --- without a thread ------------------------------------------------------------------------

ALWAYS = 1e9  # seconds: the event loop computes whatever comes
NEVER = 0.0


def test_a_call_is_computed_by_the_event_loop_once_it_is_known_to_be_short() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, inline_seconds=0.5) as batcher:
            for value in range(3):
                assert (await batcher.topk(rows(value), 1)).classes.tolist() == [[value]]
            await batcher.topk(rows(3), 2)  # of another kind, so nothing is known of it
        here = threading.current_thread()
        assert [thread is here for thread in engine.threads] == [False, True, True, False]

    asyncio.run(scenario())


def test_a_call_that_may_be_long_is_left_to_the_thread() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, inline_seconds=NEVER) as batcher:
            for value in range(3):
                await batcher.topk(rows(value), 1)
        assert threading.current_thread() not in engine.threads

    asyncio.run(scenario())


def test_requests_of_one_turn_are_joined_without_a_thread() -> None:
    async def scenario() -> None:
        engine, recorder = FakeEngine(), Recorder()
        async with batching(engine, recorder, inline_seconds=ALWAYS) as batcher:
            for _ in range(2):  # in the second turn it is known that there are several
                tasks = await queue(batcher, [(rows(i), 2, 1) for i in range(5)])
                answers = await asyncio.gather(*tasks)
                assert [answer.classes.tolist() for answer in answers] == [
                    [[i, i + 1]] for i in range(5)
                ]
        assert engine.calls == [(1, 2, 1), (4, 2, 1), (5, 2, 1)]
        assert recorder.executions == [(1, 1), (4, 4), (5, 5)]
        assert set(engine.threads) == {threading.current_thread()}

    asyncio.run(scenario())


def test_after_a_turn_with_one_request_the_next_is_computed_at_once() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, inline_seconds=ALWAYS) as batcher:
            await asyncio.gather(*await queue(batcher, [(rows(1), 1, 1), (rows(2), 1, 1)]))
            waited = batcher.ask(rows(3), 1)
            assert isinstance(waited, asyncio.Future)
            await waited
            assert not isinstance(batcher.ask(rows(4), 1), asyncio.Future)

    asyncio.run(scenario())


def test_a_wrong_request_fails_alone_without_a_thread() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, inline_seconds=ALWAYS) as batcher:
            wide = np.zeros((1, 3), np.float32)
            for _ in range(2):
                with pytest.raises(WrongWidth):
                    await batcher.topk(wide, 1)
                await asyncio.sleep(0)
            tasks = await queue(batcher, [(rows(1), 2, 1), (wide, 2, 1), (rows(2), 2, 1)])
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(found[1], WrongWidth)
            assert await batcher.healthy()
        assert [rows for rows, _, _ in engine.calls] == [1, 1]

    asyncio.run(scenario())


def test_a_failure_without_a_thread_fails_the_call_and_heals() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, inline_seconds=ALWAYS) as batcher:
            engine.failure = RuntimeError("secret")
            tasks = await queue(batcher, [(rows(i), 2, 1) for i in range(3)])
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [EngineFailed] * 3
            assert not await batcher.healthy()
            engine.failure = None
            assert await batcher.healthy()
            assert batcher.alive

    asyncio.run(scenario())


@pytest.mark.parametrize("requests", [1, 3])
def test_death_without_a_thread_leaves_nobody_waiting(requests: int) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, inline_seconds=ALWAYS) as batcher:
            engine.failure = SystemExit()
            tasks = await queue(batcher, [(rows(i), 2 + i, 1) for i in range(requests)])
            async with asyncio.timeout(30):
                first, *others = await asyncio.gather(*tasks, return_exceptions=True)
            assert type(first) is EngineFailed
            assert [type(other) for other in others] == [EngineStopped] * len(others)
            assert not batcher.alive
            assert not await batcher.healthy()
            with pytest.raises(EngineStopped):
                await batcher.topk(rows(1), 1)

    asyncio.run(scenario())


def test_a_request_given_up_before_its_turn_ends_is_not_computed() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, inline_seconds=ALWAYS) as batcher:
            first, gone, stays = [batcher.ask(rows(i), 2) for i in range(3)]
            assert not isinstance(first, asyncio.Future)
            assert isinstance(gone, asyncio.Future)
            assert isinstance(stays, asyncio.Future)
            gone.cancel()
            assert (await stays).classes.tolist() == [[2, 3]]
        assert engine.calls == [(1, 2, 1), (1, 2, 1)]

    asyncio.run(scenario())


def test_what_is_short_waits_for_the_thread_and_is_handed_back() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine) as batcher:
            first = await hold_first(batcher, engine)
            batcher._row_seconds[2, 1, True] = 0.0  # known to be short, were the engine free
            tasks = await queue(batcher, [(rows(1), 2, 1)])
            await asyncio.sleep(0)
            assert batcher.queued_rows == 1
            engine.release.set()
            await asyncio.gather(first, *tasks)
        assert [thread is threading.current_thread() for thread in engine.threads] == [False, True]

    asyncio.run(scenario())


def test_what_is_known_of_kinds_is_bounded() -> None:
    async def scenario() -> None:
        async with batching(FakeEngine(n_reachable=10**9), inline_seconds=ALWAYS) as batcher:
            for experts in range(2 * KINDS_KEPT):
                await batcher.topk(rows(1), 1, experts)
            assert len(batcher._row_seconds) <= KINDS_KEPT

    asyncio.run(scenario())
