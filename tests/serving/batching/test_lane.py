"""An engine that fails, is stuck, crashes, or is closed."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from helpers.batching import LIMITS, NEVER, batching, hold_first, queue, rows
from helpers.fake_engine import FakeEngine, Recorder
from helpers.markup_bundle import BETWEEN, write_words

from service import bundle
from service.batching import lane
from service.batching.batcher import Batcher
from service.batching.lane import MOST_GIVEN_UP
from service.batching.queue import BatchKey
from service.batching.threads import EngineThreads
from service.engine import Engine
from service.topk import EngineFailed, EngineStopped


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


def test_an_answer_after_the_loop_has_closed_is_dropped() -> None:
    engine, threads = FakeEngine(), EngineThreads.of(cpus=1)

    async def ask() -> Batcher:
        batcher = Batcher(
            engine,
            name="fake/1",
            observer=Recorder(),
            threads=threads,
            limits=LIMITS,
            max_batch_rows=9,
        )
        await hold_first(batcher, engine)
        return batcher

    batcher = asyncio.run(ask())
    engine.release.set()
    asyncio.run(batcher.close())
    assert not batcher._short.busy
    threads.close()
    for thread in engine.threads:
        thread.join(30)
        assert not thread.is_alive()


def test_a_stuck_thread_fails_what_waits_within_a_second_and_is_replaced() -> None:
    async def scenario() -> None:
        engine, recorder = FakeEngine(), Recorder()
        async with batching(engine, recorder, stuck_seconds=0.2) as batcher:
            first = await hold_first(batcher, engine)
            tasks = await queue(batcher, [(rows(1), 2, 1), (rows(2), 3, 1)])
            (stuck,) = engine.threads
            async with asyncio.timeout(10):
                outcomes = await asyncio.gather(first, *tasks, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [EngineFailed] * 3
            assert not await batcher.healthy()
            with pytest.raises(EngineFailed):  # at once: nothing is asked of it until it answers
                await batcher.topk(rows(1), 1)
            engine.release.set()  # the stuck thread comes back, and nobody listens
            async with asyncio.timeout(30):
                while not await batcher.healthy():
                    await asyncio.sleep(0.01)
            assert stuck not in engine.threads[1:]
            assert (await batcher.topk(rows(7), 1)).classes.tolist() == [[7]]
            await asyncio.to_thread(stuck.join)
        assert recorder.executions == [(1, 1)]  # what came too late is not counted

    asyncio.run(scenario())


def test_a_crashed_thread_leaves_nobody_waiting_and_is_replaced() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine) as batcher:
            first = await hold_first(batcher, engine)
            tasks = await queue(batcher, [(rows(1), 2, 1), (rows(2), 3, 1)])
            engine.failure = SystemExit()
            engine.release.set()
            async with asyncio.timeout(30):
                outcomes = await asyncio.gather(first, *tasks, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [EngineFailed] * 3
            assert not await batcher.healthy()
            engine.failure = None
            async with asyncio.timeout(30):
                while not await batcher.healthy():
                    await asyncio.sleep(0.01)
            assert (await batcher.topk(rows(7), 1)).classes.tolist() == [[7]]

    asyncio.run(scenario())


def test_an_engine_that_crashes_again_and_again_needs_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane, "PROBE_SECONDS", 0.01)

    async def scenario() -> None:
        engine = FakeEngine()
        engine.failure = SystemExit()
        async with batching(engine, inline_seconds=NEVER) as batcher:
            with pytest.raises(EngineFailed):
                await batcher.topk(rows(1), 1)
            assert batcher.alive
            async with asyncio.timeout(30):
                while batcher.alive:
                    await asyncio.sleep(0.01)
            assert not await batcher.healthy()
        assert len(engine.calls) == MOST_GIVEN_UP + 1

    asyncio.run(scenario())


def test_a_call_may_take_longer_the_more_it_has_to_do() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, stuck_seconds=0.05) as batcher:
            batcher._cost.learn(BatchKey(1, 1), 1, 1.0)  # so ten seconds are allowed
            first = await hold_first(batcher, engine)
            for _ in range(4):  # looks of the watch, which would have given up
                await asyncio.sleep(lane.WATCH_SECONDS)
            engine.release.set()
            assert (await first).classes.tolist() == [[1000]]

    asyncio.run(scenario())


def test_an_engine_that_answers_differently_than_at_first_is_not_healthy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        engine, recorder = FakeEngine(), Recorder()
        async with batching(engine, recorder) as batcher:
            batcher.warm(rows(3), 2)
            assert [calls[:2] for calls in engine.calls] == [(32, 2), (32, 2), (1, 2), (1, 1)]
            assert await batcher.healthy()
            batcher._calls._probe_classes = np.array([[4]])
            assert not await batcher.healthy()
        assert recorder.executions == []

    asyncio.run(scenario())
    assert "answers a known row differently" in caplog.text


def test_health_is_known_although_the_queue_is_full() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, limits=LIMITS._replace(rows=1)) as batcher:
            first = await hold_first(batcher, engine)
            (waiting,) = await queue(batcher, [(rows(1), 1, 1)])
            asked = asyncio.create_task(batcher.healthy())
            await asyncio.sleep(0)
            engine.release.set()
            assert await asked
            await asyncio.gather(first, waiting)

    asyncio.run(scenario())


def test_a_row_whose_first_answer_depends_on_k_is_known_again(tmp_path: Path) -> None:
    """With k above its expert's size a row is also searched elsewhere, where its best may be."""
    write_words(tmp_path / "words")
    engine = Engine(bundle.read(tmp_path / "words"))
    hidden = np.array([BETWEEN], np.float32)
    assert engine.topk(hidden, 10).classes[0, 0] != engine.topk(hidden, 1).classes[0, 0]

    async def scenario() -> None:
        async with batching(engine) as batcher:
            batcher.warm(hidden, 10)
            assert await batcher.healthy()

    asyncio.run(scenario())
