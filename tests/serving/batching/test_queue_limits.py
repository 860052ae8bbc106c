"""What may wait for an engine, and what a row is expected to cost."""

import asyncio

import pytest
from helpers.batching import ALWAYS, LIMITS, batching, hold_first, queue, rows
from helpers.fake_engine import FakeEngine

from service.batching.cost import KEYS_KEPT, RowCost
from service.batching.queue import BatchKey, BatchQueue, Job, QueueLimits
from service.topk import Answered, QueueFull


@pytest.mark.parametrize(
    "limits", [LIMITS._replace(rows=3), LIMITS._replace(bytes=3 * 8)], ids=["rows", "bytes"]
)
def test_a_full_queue_refuses_at_once(limits: QueueLimits) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, limits=limits) as batcher:
            first = await hold_first(batcher, engine)
            (waiting,) = await queue(batcher, [(rows(1, 2), 1, 1)])
            with pytest.raises(QueueFull, match="fake/1 has as much waiting as it can hold"):
                await batcher.topk(rows(3, 4), 1)
            (fits,) = await queue(batcher, [(rows(5), 1, 1)])
            engine.release.set()
            await asyncio.gather(first, waiting, fits)
            assert (await batcher.topk(rows(3, 4), 1)).classes.tolist() == [[3], [4]]

    asyncio.run(scenario())


def test_what_would_wait_too_long_is_refused_before_anyone_reads_it() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, limits=LIMITS._replace(seconds=0.5)) as batcher:
            first = await hold_first(batcher, engine)
            batcher._cost.learn(BatchKey(2, 1), 1, 0.2)
            fitting = await queue(batcher, [(rows(1, 2), 2, 1), (rows(3), 2, 1)])  # 0.6 s of work
            with pytest.raises(QueueFull):
                batcher.admit()
            with pytest.raises(QueueFull):
                await batcher.topk(rows(4), 2)
            engine.release.set()
            await asyncio.gather(first, *fitting)
            batcher.admit()

    asyncio.run(scenario())


@pytest.mark.parametrize("lasting", [False, True])
def test_a_burst_may_wait_longer_than_a_lasting_load(lasting: bool) -> None:
    limits = LIMITS._replace(
        seconds=1.0, lasting_seconds=0.1, burst_seconds=1e-9 if lasting else 60.0
    )

    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, limits=limits) as batcher:
            first = await hold_first(batcher, engine)
            batcher._cost.learn(BatchKey(2, 1), 1, 0.2)
            waiting = await queue(batcher, [(rows(1), 2, 1)])
            if lasting:
                with pytest.raises(QueueFull):
                    batcher.admit()
            else:
                waiting += await queue(batcher, [(rows(2), 2, 1)])
            engine.release.set()
            await asyncio.gather(first, *waiting)

    asyncio.run(scenario())


def test_an_engine_without_work_ends_a_lasting_load() -> None:
    async def scenario() -> None:
        future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        waiting = BatchQueue(QueueLimits(100, 10**6, 1.0, lasting_seconds=0.1, burst_seconds=0.5))
        waiting.note_idle(10.0)
        waiting.add(Job(rows(1), BatchKey(2, 1), future, 10.0, 1e9, 0.3, 0.3))
        assert waiting.has_room(1, 8, 10.4)
        assert not waiting.has_room(1, 8, 10.6)
        waiting.note_idle(10.7)
        assert waiting.has_room(1, 8, 10.8)

    asyncio.run(scenario())


def test_a_request_larger_than_the_bounds_may_wait_alone() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, limits=QueueLimits(2, 8, 0.1)) as batcher:
            first = await hold_first(batcher, engine)
            batcher._cost.learn(BatchKey(2, 1), 1, 1.0)
            (alone,) = await queue(batcher, [(rows(1, 2, 3), 2, 1)])
            engine.release.set()
            await asyncio.gather(first, alone)

    asyncio.run(scenario())


def test_what_is_known_of_keys_is_bounded() -> None:
    async def scenario() -> None:
        async with batching(FakeEngine(n_reachable=10**9), inline_seconds=ALWAYS) as batcher:
            for experts in range(2 * KEYS_KEPT):
                await batcher.topk(rows(1), 1, experts)
            assert len(batcher._cost) <= KEYS_KEPT

    asyncio.run(scenario())


def test_one_slow_call_does_not_make_the_queue_look_long() -> None:
    cost, key = RowCost(lambda k, experts, _mode: k * experts), BatchKey(1, 1)
    for _ in range(10):
        cost.learn(key, 1, 1e-5)
    cost.learn(key, 1, 1.0)
    assert cost.typical(key, 1) < 2e-5
    for _ in range(100):  # but slow calls do
        cost.learn(key, 1, 1.0)
    assert cost.typical(key, 1) == 1.0
    assert cost.typical(BatchKey(2, 3), 1) == 6.0  # of a key never called, by its scores
    for _ in range(20):
        cost.learn(key, 1, 1e-5)
    assert cost.typical(key, 1) < 2e-5


def test_a_call_that_was_given_up_costs_no_less_than_it_took() -> None:
    cost, key = RowCost(lambda k, experts, _mode: k * experts), BatchKey(1, 1)
    for _ in range(10):
        cost.learn(key, 1, 1e-5)
    cost.learn_given_up(key, 4, 8.0)
    assert cost.typical(key, 1) == cost.fastest(key, 1) == 2.0
    cost.learn_given_up(key, 4, 1.0)  # given up sooner, because others were waiting
    assert cost.typical(key, 1) == 2.0


def test_the_rest_of_a_running_call_counts() -> None:
    waiting = BatchQueue(QueueLimits(100, 10**6, 0.05))
    assert waiting.has_room(1, 8, 0.0)
    assert waiting.has_room(1, 8, 0.0, running_seconds=0.04)
    assert not waiting.has_room(1, 8, 0.0, running_seconds=0.06)
