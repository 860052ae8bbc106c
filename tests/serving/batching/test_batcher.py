import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
from helpers.fake_engine import FakeEngine, Recorder
from helpers.markup_bundle import BETWEEN, write_words
from helpers.tiny_bundle import rows_for
from numpy.typing import NDArray

from service import bundle
from service.batching import batcher as batcher_module
from service.batching.batcher import BATCH_SECONDS, INLINE_SECONDS, THREADS_LOST, Batcher
from service.batching.cost import KINDS_KEPT, RowCost
from service.batching.queue import BatchQueue, Job, QueueLimits
from service.engine import Engine
from service.errors import KOutOfRange, WrongWidth
from service.topk import Answer, Answered, DeadlineExceeded, EngineFailed, EngineStopped, QueueFull

Request = tuple[NDArray[np.float32], int, int]
BOUNDS = QueueLimits(rows=100, bytes=10**6, seconds=1e9)


def rows(*values: float) -> NDArray[np.float32]:
    return np.array([[value, 0.0] for value in values], np.float32)


@asynccontextmanager
async def batching(
    engine: FakeEngine | Engine,
    recorder: Recorder | None = None,
    bounds: QueueLimits = BOUNDS,
    max_batch_rows: int = 100,
    inline_seconds: float = INLINE_SECONDS,
    stuck_seconds: float = 60.0,
) -> AsyncIterator[Batcher]:
    batcher = Batcher(
        engine,
        name="fake/1",
        observer=recorder or Recorder(),
        bounds=bounds,
        max_batch_rows=max_batch_rows,
        inline_seconds=inline_seconds,
        stuck_seconds=stuck_seconds,
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


def test_no_more_are_joined_than_a_call_may_take() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine) as batcher:
            first = await hold_first(batcher, engine)
            batcher._rates.learn((3, 1, True), 0.4 * BATCH_SECONDS)
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


@pytest.mark.parametrize(
    "bounds", [BOUNDS._replace(rows=3), BOUNDS._replace(bytes=3 * 8)], ids=["rows", "bytes"]
)
def test_a_full_queue_refuses_at_once(bounds: QueueLimits) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, bounds=bounds) as batcher:
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
        async with batching(engine, bounds=BOUNDS._replace(seconds=0.5)) as batcher:
            first = await hold_first(batcher, engine)
            batcher._rates.learn((2, 1, True), 0.2)
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
    bounds = BOUNDS._replace(
        seconds=1.0, lasting_seconds=0.1, burst_seconds=1e-9 if lasting else 60.0
    )

    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, bounds=bounds) as batcher:
            first = await hold_first(batcher, engine)
            batcher._rates.learn((2, 1, True), 0.2)
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
        waiting.found_empty(10.0)
        waiting.add(Job(rows(1), (2, 1, True), future, 10.0, 1e9, 0.3))
        assert waiting.has_room(1, 8, 10.4)
        assert not waiting.has_room(1, 8, 10.6)
        waiting.found_empty(10.7)
        assert waiting.has_room(1, 8, 10.8)

    asyncio.run(scenario())


def test_a_request_larger_than_the_bounds_may_wait_alone() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, bounds=QueueLimits(2, 8, 0.1)) as batcher:
            first = await hold_first(batcher, engine)
            batcher._rates.learn((2, 1, True), 1.0)
            (alone,) = await queue(batcher, [(rows(1, 2, 3), 2, 1)])
            engine.release.set()
            await asyncio.gather(first, alone)

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
            engine, name="fake/1", observer=Recorder(), bounds=BOUNDS, max_batch_rows=9
        )
        await hold_first(batcher, engine)
        return batcher

    batcher = asyncio.run(ask())
    engine.release.set()
    asyncio.run(batcher.close())
    assert batcher._thread is not None and not batcher._thread.is_alive()


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
            batcher._rates.learn((2, 1, True), 0.0)  # known to be short, were the engine free
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
            assert len(batcher._rates.bests) <= KINDS_KEPT

    asyncio.run(scenario())


# --- deadlines -------------------------------------------------------------------------------


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


# --- an engine that is stuck or crashes ------------------------------------------------------


def test_a_stuck_thread_fails_what_waits_within_a_second_and_is_replaced() -> None:
    async def scenario() -> None:
        engine, recorder = FakeEngine(), Recorder()
        async with batching(engine, recorder, stuck_seconds=0.2) as batcher:
            first = await hold_first(batcher, engine)
            tasks = await queue(batcher, [(rows(1), 2, 1), (rows(2), 3, 1)])
            stuck = batcher._thread
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
            assert batcher._thread is not stuck
            assert (await batcher.topk(rows(7), 1)).classes.tolist() == [[7]]
            assert stuck is not None
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


def test_an_engine_that_crashes_again_and_again_is_beyond_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batcher_module, "PROBE_SECONDS", 0.01)

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
        assert len(engine.calls) == THREADS_LOST + 1

    asyncio.run(scenario())


def test_a_call_may_take_longer_the_more_it_has_to_do() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, stuck_seconds=0.05) as batcher:
            batcher._rates.learn((1, 1, True), 1.0)  # so ten seconds are allowed
            first = await hold_first(batcher, engine)
            for _ in range(4):  # looks of the watch, which would have given up
                await asyncio.sleep(batcher_module.WATCH_SECONDS)
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
            batcher._expected = np.array([[4]])
            assert not await batcher.healthy()
        assert recorder.executions == []

    asyncio.run(scenario())
    assert "answers a known row differently" in caplog.text


def test_a_warm_engine_computes_the_first_request_in_the_event_loop() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, inline_seconds=ALWAYS) as batcher:
            batcher.warm(rows(3), 2)
            assert not isinstance(batcher.ask(rows(4), 2), asyncio.Future)

    asyncio.run(scenario())


def test_health_is_known_although_the_queue_is_full() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, bounds=BOUNDS._replace(rows=1)) as batcher:
            first = await hold_first(batcher, engine)
            (waiting,) = await queue(batcher, [(rows(1), 1, 1)])
            asked = asyncio.create_task(batcher.healthy())
            await asyncio.sleep(0)
            engine.release.set()
            assert await asked
            await asyncio.gather(first, waiting)

    asyncio.run(scenario())


def test_one_slow_call_does_not_make_the_queue_look_long() -> None:
    rates, kind = RowCost(), (1, 1, True)
    for _ in range(10):
        rates.learn(kind, 1e-5)
    rates.learn(kind, 1.0)
    assert rates.usual(kind) < 2e-5
    for _ in range(100):  # but slow calls do
        rates.learn(kind, 1.0)
    assert rates.usual(kind) == 1.0
    assert rates.usual((2, 1, True)) == 1.0  # of a kind nobody knows
    for _ in range(20):
        rates.learn(kind, 1e-5)
    assert rates.usual(kind) < 2e-5
