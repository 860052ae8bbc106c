"""What is joined with what, and that a promised recall is planned for as the scan it may become."""

import asyncio

import pytest
from helpers.batching import ALWAYS, NEVER, batching, hold_first, queue, rows
from helpers.fake_engine import CONTRACT, FakeEngine, Recorder

from service.batching import long_lane
from service.batching.cost import KEYS_KEPT, UNKNOWN_SECONDS, RowCost
from service.batching.queue import BatchKey
from service.topk import SPARSE, Mode

EXACT, RECALL = Mode(exact=True), Mode(recall=0.9)


def scores(k: int, experts: int, mode: Mode) -> int:
    """Of a layer with 1,000 classes, 10 in each expert."""
    return k + (1000 if mode.exact else 10 * experts + 1000 * (mode.recall is not None))


def test_only_requests_of_one_mode_are_joined() -> None:
    async def scenario() -> None:
        engine, recorder = FakeEngine(contract=CONTRACT), Recorder()
        async with batching(engine, recorder, inline_seconds=NEVER) as batcher:
            first = await hold_first(batcher, engine)
            asked = [
                (rows(1), 1, 1), (rows(2), 1, 1, EXACT), (rows(3), 1, 1, RECALL),
                (rows(4), 1, 1, Mode(recall=0.99)), (rows(5), 1, 1, EXACT), (rows(6), 1, 1),
            ]  # fmt: skip
            waiting = await queue(batcher, asked)
            engine.release.set()
            answers = [await task for task in waiting]
            await first
        assert [answer.classes.tolist() for answer in answers] == [[[i]] for i in range(1, 7)]
        assert [None if a.rungs is None else a.rungs.tolist() for a in answers] == [
            None, [2], [0], [0], [2], None
        ]  # fmt: skip
        called = sorted(
            zip(engine.modes[1:], (n for n, *_ in engine.calls[1:]), strict=True), key=str
        )
        expected = {SPARSE: 2, EXACT: 2, RECALL: 1, Mode(recall=0.99): 1}
        assert dict(called) == expected
        assert sorted(recorder.rungs, key=str) == sorted(
            [(EXACT, [2, 2]), (RECALL, [0]), (Mode(recall=0.99), [0])], key=str
        )

    asyncio.run(scenario())


def test_an_answer_in_slices_says_how_each_row_was_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_lane, "FEWEST_ROWS", 2)

    async def scenario() -> None:
        engine, recorder = FakeEngine(contract=CONTRACT), Recorder()
        hidden = rows(*range(7))
        hidden[3, 1] = 1.0
        async with batching(engine, recorder, max_batch_seconds=0.01) as batcher:
            batcher._cost.learn(BatchKey(2, 1, mode=RECALL), 1, 0.005)
            answer = await batcher.topk(hidden, 2, 1, RECALL)
        assert answer.rungs is not None and answer.searched is not None
        assert answer.rungs.tolist() == [0, 0, 0, 1, 0, 0, 0]
        assert answer.searched.tolist() == [1] * 7
        assert len(engine.calls) > 1
        assert recorder.rungs == [(RECALL, [0, 0, 0, 1, 0, 0, 0])]

    asyncio.run(scenario())


def test_a_wrong_mode_fails_no_other_request() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine, inline_seconds=ALWAYS) as batcher:
            for mode in (EXACT, RECALL):
                with pytest.raises(Exception, match="ships no output layer"):
                    await batcher.topk(rows(1), 1, 1, mode)
            assert (await batcher.topk(rows(1), 1)).classes.tolist() == [[1]]
            assert len(engine.calls) == 1

    asyncio.run(scenario())


def test_warming_up_learns_what_a_scan_costs() -> None:
    async def scenario(engine: FakeEngine) -> float:
        async with batching(engine) as batcher:
            batcher.warm(rows(1), 5)
            return batcher._cost.fastest(BatchKey(5, 1, mode=RECALL), 1)

    engine = FakeEngine(contract=CONTRACT)
    assert asyncio.run(scenario(engine)) < UNKNOWN_SECONDS
    assert engine.modes.count(EXACT) == 2
    engine = FakeEngine()
    assert asyncio.run(scenario(engine)) == UNKNOWN_SECONDS
    assert EXACT not in engine.modes


# --- costs -------------------------------------------------------------------------------------


def test_easy_rows_do_not_make_a_promise_look_short() -> None:
    cost, promised = RowCost(scores), BatchKey(10, 1, mode=RECALL)
    cost.learn(BatchKey(10, 1), 1, 20e-6)
    assert cost.fastest(promised, 1) == UNKNOWN_SECONDS, "nobody knows what a scan takes"
    cost.learn(BatchKey(10, 1, mode=EXACT), 1, 2e-3)
    for _ in range(50):
        cost.learn(promised, 1, 30e-6)
    assert cost.fastest(promised, 1) == pytest.approx(2e-3, rel=0.02), "a row may be scanned"
    assert cost.most(promised, 3) == pytest.approx(6e-3, rel=0.02)
    assert cost.typical(promised, 1) == pytest.approx(30e-6), "as they have been so far"
    assert cost.most(BatchKey(10, 1), 3) == cost.typical(BatchKey(10, 1), 3)


def test_a_scan_tells_nothing_of_a_search_and_the_other_way_round() -> None:
    cost = RowCost(scores)
    cost.learn(BatchKey(10, 1), 1, 20e-6)  # a score takes 1 us
    cost.learn(BatchKey(10, 1, mode=EXACT), 1, 101e-6)  # here a tenth of it
    assert cost.typical(BatchKey(10, 2), 1) == pytest.approx(30e-6)
    assert cost.typical(BatchKey(20, 1, mode=EXACT), 1) == pytest.approx(102e-6)
    cost.learn(BatchKey(10, 1, mode=RECALL), 1, 20e-6)
    assert cost.typical(BatchKey(10, 2), 1) == pytest.approx(30e-6)


def test_what_is_forgotten_does_not_make_a_scan_cheap() -> None:
    cost = RowCost(scores)
    cost.learn(BatchKey(10, 1, mode=EXACT), 1, 2e-3)
    for level in range(KEYS_KEPT + 10):  # clients choose them
        cost.learn(BatchKey(10, 1, mode=Mode(recall=(level + 1) / 10_000)), 1, 30e-6)
    assert len(cost) <= KEYS_KEPT
    assert cost.fastest(BatchKey(10, 1, mode=RECALL), 1) == pytest.approx(2e-3, rel=0.02)


def test_promises_are_joined_by_what_they_may_take() -> None:
    """A row takes 20 us if it is easy and 4 ms if not: 10 ms hold two."""

    async def scenario() -> None:
        engine = FakeEngine(contract=CONTRACT)
        async with batching(engine, inline_seconds=NEVER, max_batch_seconds=0.01) as batcher:
            batcher._cost.learn(BatchKey(1, 1, mode=EXACT), 1, 4e-3)
            batcher._cost.learn(BatchKey(1, 1, mode=RECALL), 1, 20e-6)
            first = await hold_first(batcher, engine)
            waiting = await queue(batcher, [(rows(i), 1, 1, RECALL) for i in range(5)])
            engine.release.set()
            await asyncio.gather(first, *waiting)
        called = zip(engine.calls, engine.modes, strict=True)
        assert max(n for (n, *_), mode in called if mode == RECALL) == 2

    asyncio.run(scenario())
