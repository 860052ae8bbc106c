"""Calls that the event loop computes without a thread."""

import asyncio
import threading

import numpy as np
import pytest
from helpers.batching import ALWAYS, NEVER, batching, hold_first, queue, rows
from helpers.fake_engine import FakeEngine, Recorder

from service.batching.queue import BatchKey
from service.errors import WrongWidth
from service.topk import EngineFailed


def test_a_call_is_computed_by_the_event_loop_once_it_is_known_to_be_short() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, inline_seconds=0.5) as batcher:
            for value in range(3):
                assert (await batcher.topk(rows(value), 1)).classes.tolist() == [[value]]
            await batcher.topk(rows(3), 2)  # another key, so nothing is known of it
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


def test_even_an_exit_within_the_event_loop_is_only_a_failure() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, inline_seconds=ALWAYS) as batcher:
            engine.failure = SystemExit()
            tasks = await queue(batcher, [(rows(i), 2 + i, 1) for i in range(3)])
            async with asyncio.timeout(30):
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [EngineFailed] * 3
            assert not await batcher.healthy()
            engine.failure = None
            assert await batcher.healthy()

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
            batcher._cost.learn(BatchKey(2, 1), 1, 0.0)  # known to be short, were the engine free
            tasks = await queue(batcher, [(rows(1), 2, 1)])
            await asyncio.sleep(0)
            assert batcher.queued_rows == 1
            engine.release.set()
            await asyncio.gather(first, *tasks)
        assert [thread is threading.current_thread() for thread in engine.threads] == [False, True]

    asyncio.run(scenario())


def test_a_warm_engine_computes_the_first_request_in_the_event_loop() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, inline_seconds=ALWAYS) as batcher:
            batcher.warm(rows(3), 2)
            assert not isinstance(batcher.ask(rows(4), 2), asyncio.Future)

    asyncio.run(scenario())
