"""Requests that take long: computed in slices, apart from all others."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
from helpers.batching import LIMITS, batching, rows
from helpers.fake_engine import FakeEngine, Recorder
from helpers.markup_bundle import write_words
from numpy.typing import NDArray

from service import bundle
from service.batching import long_lane
from service.batching.batcher import Batcher
from service.batching.queue import BatchKey
from service.batching.threads import ThreadGroup
from service.engine import Engine
from service.topk import SPARSE, Answered, DeadlineExceeded, EngineFailed, Mode, QueueFull, TopK

LONG = BatchKey(2, 1)  # k = 2 is what takes long


@pytest.fixture(autouse=True)
def two_rows_to_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_lane, "SLICE_CANDIDATES", 2 * LONG.k)


class SteppedEngine(FakeEngine):
    """Waits in each call with k = 2 until the test lets it go on; other calls are answered."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = threading.Semaphore(0)
        self.slices: list[int] = []
        self.in_slice = threading.Semaphore(0)

    async def slice_begun(self) -> None:
        assert await asyncio.to_thread(self.in_slice.acquire, timeout=30)

    def topk(
        self, hidden: NDArray[np.float32], k: int, experts: int = 1, mode: Mode = SPARSE
    ) -> TopK:
        if k == 2:
            self.slices.append(len(hidden))
            self.in_slice.release()
            if not self.steps.acquire(timeout=30):
                raise TimeoutError("The test never let the slice go on.")
        return super().topk(hidden, k, experts, mode)


def ask_long(batcher: Batcher, n_rows: int, **more: float) -> "asyncio.Future[Answered]":
    batcher._cost.learn(BatchKey(1, 1), 1, 1e-6)  # others are short
    batcher._cost.learn(LONG, 1, 0.01)
    answer = batcher.ask(rows(*range(n_rows)), 2, **more)  # type: ignore[arg-type]
    assert isinstance(answer, asyncio.Future)
    return answer


def run(scenario: Callable[[Batcher, SteppedEngine], object]) -> Recorder:
    async def started() -> Recorder:
        engine, recorder = SteppedEngine(), Recorder()
        limits = LIMITS._replace(seconds=0.05)
        async with batching(engine, recorder, limits, max_batch_seconds=0.01) as batcher:
            async with asyncio.timeout(60):
                await scenario(batcher, engine)  # type: ignore[misc]
        return recorder

    return asyncio.run(started())


def test_slices_together_are_the_answer_of_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_words(tmp_path / "words")
    engine, recorder = Engine(bundle.read(tmp_path / "words")), Recorder()
    hidden = np.random.default_rng(3).normal(size=(11, engine.hidden_size)).astype(np.float32)
    expected = engine.topk(hidden, 3, 2)
    monkeypatch.setattr(long_lane, "SLICE_CANDIDATES", 3 * 2 * 4)  # 4 rows

    async def scenario() -> Answered:
        async with batching(engine, recorder, max_batch_seconds=0.0) as batcher:
            batcher.warm(hidden, 3)
            return await batcher.topk(hidden, 3, 2)

    answer = asyncio.run(scenario())
    for name in ("classes", "log_probs", "experts", "gates"):
        assert np.array_equal(getattr(answer, name), getattr(expected, name)), name
    assert recorder.executions == [(1, 11)]  # one request of 11 rows, however it was sliced


def test_others_are_answered_between_and_during_slices() -> None:
    async def scenario(batcher: Batcher, engine: SteppedEngine) -> None:
        answer = ask_long(batcher, 5)
        for _ in range(3):
            await engine.slice_begun()
            # A slice is held: were others behind it, they would wait for ever.
            assert (await batcher.topk(rows(7), 1)).classes.tolist() == [[7]]
            engine.steps.release()
        assert (await answer).classes[:, 0].tolist() == [0, 1, 2, 3, 4]
        assert engine.slices == [2, 2, 1]

    assert run(scenario).executions == [(1, 1)] * 3 + [(1, 5)]


def test_what_nobody_waits_for_is_not_computed_further() -> None:
    async def scenario(batcher: Batcher, engine: SteppedEngine) -> None:
        answer = ask_long(batcher, 50)
        await engine.slice_begun()
        answer.cancel()
        engine.steps.release(50)
        batcher._long.stop()
        await batcher._long.drain()
        assert engine.slices == [2]

    assert run(scenario).executions == []


def test_a_deadline_ends_the_work_after_the_slice() -> None:
    async def scenario(batcher: Batcher, engine: SteppedEngine) -> None:
        answer = ask_long(batcher, 50, deadline=perf_counter() + 2.0)
        await engine.slice_begun()
        with pytest.raises(DeadlineExceeded):  # while the slice is still held
            await answer
        engine.steps.release(50)
        batcher._long.stop()
        await batcher._long.drain()
        assert engine.slices == [2]

    assert run(scenario).executions == []


def test_what_cannot_be_in_time_is_refused_before_any_work() -> None:
    async def scenario(batcher: Batcher, engine: SteppedEngine) -> None:
        with pytest.raises(DeadlineExceeded):
            ask_long(batcher, 50, deadline=perf_counter() + 0.05)
        assert engine.slices == []

    run(scenario)


def test_the_running_call_counts_against_the_wait() -> None:
    async def scenario(batcher: Batcher, engine: SteppedEngine) -> None:
        answer = ask_long(batcher, 50)  # half a second
        await engine.slice_begun()
        with pytest.raises(QueueFull):
            ask_long(batcher, 2)
        assert (await batcher.topk(rows(7), 1)).classes.tolist() == [[7]]
        engine.steps.release(50)
        await answer
        again = ask_long(batcher, 2)
        engine.steps.release()
        await again

    run(scenario)


def test_a_slice_that_is_given_up_fails_alone_and_teaches_the_price() -> None:
    async def scenario() -> None:
        engine, recorder = SteppedEngine(), Recorder()
        async with batching(
            engine, recorder, max_batch_seconds=0.01, stuck_seconds=0.05
        ) as batcher:
            answer = ask_long(batcher, 4)
            expected = batcher._cost.typical(LONG, 1)
            async with asyncio.timeout(60):
                with pytest.raises(EngineFailed):
                    await answer
                # Only requests as long as it are refused until a thread has answered.
                assert (await batcher.topk(rows(7), 1)).classes.tolist() == [[7]]
                assert batcher._cost.typical(LONG, 1) > 5 * expected
                engine.steps.release(100)
                while not await batcher.healthy():
                    await asyncio.sleep(0.01)
                assert (await ask_long(batcher, 4)).classes[:, 0].tolist() == [0, 1, 2, 3]

    asyncio.run(scenario())


def test_threads_are_shared_and_take_turns() -> None:
    group, done = ThreadGroup("shared", 1), threading.Semaphore(0)
    order: list[str] = []
    first_is_in = threading.Event()

    def turns(name: str, count: int) -> Callable[[], bool]:
        left = [count]

        def turn() -> bool:
            first_is_in.wait(30)
            order.append(name)
            left[0] -= 1
            if not left[0]:
                done.release()
            return left[0] > 0

        return turn

    group.submit(turns("a", 3))
    group.submit(turns("b", 2))
    first_is_in.set()
    assert done.acquire(timeout=30) and done.acquire(timeout=30)
    assert order == ["a", "b", "a", "b", "a"]
    group.close()


def test_without_another_thread_the_first_one_computes_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, done = ThreadGroup("shared", 4), threading.Semaphore(0)
    group.start()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)

    def turn() -> bool:
        done.release()
        return False

    for _ in range(3):
        group.submit(turn)
    for _ in range(3):
        assert done.acquire(timeout=30)
    group.close()
