"""Requests that are late, while they wait or while they are computed."""

import asyncio
from time import perf_counter

import pytest
from helpers.batching import ALWAYS, batching, hold_first, rows
from helpers.fake_engine import FakeEngine

from service.batching.batcher import Batcher
from service.topk import Answered, DeadlineExceeded


async def ask_by(batcher: Batcher, value: int, seconds: float) -> Answered:
    answer = batcher.ask(rows(value), 2, deadline=perf_counter() + seconds)
    return await answer if isinstance(answer, asyncio.Future) else answer


def test_a_late_answer_is_refused_while_the_engine_is_busy_and_never_computed() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine) as batcher:
            first = await hold_first(batcher, engine)
            stays = asyncio.create_task(ask_by(batcher, 5, 60.0))
            with pytest.raises(DeadlineExceeded):
                await ask_by(batcher, 1, 0.02)
            assert batcher.queued_rows == 1
            engine.release.set()
            assert (await stays).classes.tolist() == [[5, 6]]
            await first
        assert engine.calls == [(1, 1, 1), (1, 2, 1)]

    asyncio.run(scenario())


def test_a_request_under_way_is_refused_at_its_deadline() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine) as batcher:
            engine.hold()
            with pytest.raises(DeadlineExceeded):
                await ask_by(batcher, 1, 0.02)
            engine.release.set()
            assert (await batcher.topk(rows(2), 1)).classes.tolist() == [[2]]

    asyncio.run(scenario())


def test_late_ones_of_a_call_do_not_disturb_the_others() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, inline_seconds=ALWAYS) as batcher:
            await batcher.topk(rows(0), 2)
            tasks = [ask_by(batcher, value, 0.0 if value % 2 else 60.0) for value in range(1, 6)]
            tasks.insert(0, ask_by(batcher, 6, 60.0))  # computed at once: it joins the rest
            found = await asyncio.gather(*tasks, return_exceptions=True)
        late = [type(outcome) is DeadlineExceeded for outcome in found]
        assert late == [False, True, False, True, False, True]
        assert [f.classes[0, 0] for f in found if not isinstance(f, BaseException)] == [6, 2, 4]

    asyncio.run(scenario())
