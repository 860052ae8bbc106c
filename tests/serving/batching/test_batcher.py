"""Requests that are joined into one engine call."""

import asyncio
from time import perf_counter

import numpy as np
import pytest
from helpers.batching import batching, hold_first, queue, rows
from helpers.fake_engine import FakeEngine, Recorder
from helpers.tiny_bundle import rows_for

from service.batching.batcher import BATCH_SECONDS
from service.batching.queue import BatchKey
from service.engine import Engine
from service.errors import KOutOfRange, WrongWidth
from service.topk import Answer, Answered


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


def test_no_more_are_joined_than_a_call_may_take() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, max_batch_seconds=BATCH_SECONDS) as batcher:
            first = await hold_first(batcher, engine)
            batcher._cost.learn(BatchKey(3, 1), 1, 0.4 * BATCH_SECONDS)
            tasks = await queue(batcher, [(rows(i), 3, 1) for i in range(5)])
            engine.release.set()
            await asyncio.gather(first, *tasks)
        assert engine.calls[1:] == [(2, 3, 1), (2, 3, 1), (1, 3, 1)]

    asyncio.run(scenario())


def test_a_request_larger_than_a_batch_runs_alone() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, max_batch_rows=2) as batcher:
            answer = await batcher.topk(rows(1, 2, 3, 4, 5), 1)
        assert answer.classes.tolist() == [[1], [2], [3], [4], [5]]

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


def test_the_answer_of_a_joined_call_says_when_it_was_made() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine) as batcher:
            before = perf_counter()
            first = await hold_first(batcher, engine)
            (task,) = await queue(batcher, [(rows(1), 2, 1)])
            engine.release.set()
            await first
            answer = await task
            assert isinstance(answer, Answer)
            assert before < answer.call.started <= answer.call.ended < perf_counter()
            assert (answer.call.gate_seconds, answer.call.expert_seconds.sum()) == (0.001, 0.002)

    asyncio.run(scenario())
