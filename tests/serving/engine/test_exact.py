"""Exact answers are those of float64 over all classes, whatever the numbers."""

import numpy as np
import pytest
from helpers import fidelity_layer as by_numpy
from helpers.fidelity_layer import Floats, layer
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine import Engine
from service.engine.kernels import best, certified
from service.engine.kernels.class_lists import LONGEST, ClassLists
from service.engine.kernels.products import bounded_products, int16_products
from service.engine.kernels.products.int16_intrinsics import BYTES, EIGHT, HAS_VNNI, WORDS
from service.engine.kernels.products.intrinsics import HAS_AVX2
from service.topk import RUNGS, Mode

EXACT = Mode(exact=True)
shapes = st.tuples(st.integers(1, 700), st.sampled_from([1, 2, 15, 16, 17, 31, 40, 64, 100, 130]))
seeds = st.integers(0, 2**32 - 1)
examples = settings(max_examples=60, deadline=None)


def check(head: Floats, hidden: Floats, k: int, bias: Floats | None = None) -> None:
    k = min(k, len(head))
    found = Engine(layer(head, [[0]], bias=bias)).topk(hidden, k, mode=EXACT)
    scores = by_numpy.all_scores(head, hidden, bias)
    wanted = by_numpy.best(scores, k)
    assert found.classes.tolist() == wanted.tolist()
    log_probs = np.take_along_axis(scores, wanted, axis=1)
    log_probs = log_probs - by_numpy.logsumexp(scores)[:, None]
    lowest = np.finfo(np.float32).min
    # The normaliser is made of approximate scores but for the largest ones.
    size = np.abs(scores).max()
    np.testing.assert_allclose(found.log_probs, log_probs.clip(lowest), atol=1e-4 + 2e-2 * size)
    assert found.searched is not None and not found.searched.any()
    assert found.rungs is not None and {RUNGS[rung] for rung in found.rungs} == {"exact"}


@examples
@given(shapes, st.integers(1, 40), seeds, st.booleans())
def test_usual_rows(shape: tuple[int, int], k: int, seed: int, biased: bool) -> None:
    rng = np.random.default_rng(seed)
    head = rng.normal(size=shape).astype(np.float32)
    bias = rng.normal(size=len(head)).astype(np.float32) if biased else None
    check(head, rng.normal(size=(3, shape[1])).astype(np.float32), k, bias)


@examples
@given(shapes, st.integers(1, 40), seeds)
def test_ties_go_by_class(shape: tuple[int, int], k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    few = rng.normal(size=(4, shape[1])).astype(np.float32)
    few[3] = 0
    head = few[rng.integers(0, 4, shape[0])]  # many rows are equal, some are zero
    check(head, rng.normal(size=(2, shape[1])).astype(np.float32), k)


@examples
@given(shapes, st.integers(1, 40), seeds)
def test_whole_numbers_that_often_tie(shape: tuple[int, int], k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    head = rng.integers(-3, 4, shape).astype(np.float32)
    check(head, rng.integers(-2, 3, (3, shape[1])).astype(np.float32), k)


@examples
@given(shapes, st.integers(1, 40), seeds, st.integers(-40, 37), st.integers(-40, 37))
def test_numbers_of_every_size(
    shape: tuple[int, int], k: int, seed: int, weights: int, query: int
) -> None:
    """Of rows that differ in size from each other too, down to those that vanish."""
    rng = np.random.default_rng(seed)
    spread = 10.0 ** rng.uniform(-3, 0, (shape[0], 1))
    head = (rng.uniform(-1, 1, shape) * 10.0**weights * spread).astype(np.float32)
    check_order(head, (rng.uniform(-1, 1, (2, shape[1])) * 10.0**query).astype(np.float32), k)


@examples
@given(shapes, st.integers(1, 40), seeds, st.sampled_from([1e2, 1e6, 1e30, 3e38]))
def test_a_few_huge_coordinates(shape: tuple[int, int], k: int, seed: int, largest: float) -> None:
    rng = np.random.default_rng(seed)
    head = rng.normal(size=shape).astype(np.float32)
    hidden = rng.normal(size=(2, shape[1])).astype(np.float32)
    hidden[:, rng.integers(shape[1])] = largest
    check_order(head, hidden, k)


@examples
@given(shapes, st.integers(1, 40), seeds, st.sampled_from([1e-30, 1.0, 1e30]))
def test_biases_of_any_size(shape: tuple[int, int], k: int, seed: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    head = rng.normal(size=shape).astype(np.float32)
    bias = (size * rng.integers(-2, 3, shape[0])).astype(np.float32)
    check_order(head, rng.normal(size=(2, shape[1])).astype(np.float32), k, bias)


def check_order(head: Floats, hidden: Floats, k: int, bias: Floats | None = None) -> None:
    """The same classes; where float64 adds in another order, sums may differ in their last bits."""
    k = min(k, len(head))
    found = Engine(layer(head, [[0]], bias=bias)).topk(hidden, k, mode=EXACT)
    scores = by_numpy.all_scores(head, hidden, bias)
    wanted = np.take_along_axis(scores, by_numpy.best(scores, k), axis=1)
    got = np.take_along_axis(scores, found.classes, axis=1)
    largest = np.abs(head).astype(np.float64).max() * np.abs(hidden).astype(np.float64).max()
    np.testing.assert_allclose(got, wanted, rtol=1e-14, atol=1e-14 * largest * head.shape[1])
    assert all(len(set(row)) == k for row in found.classes.tolist())
    assert np.isfinite(found.log_probs).all()


def test_a_row_of_zeros_is_answered_by_class_or_bias() -> None:
    head = np.random.default_rng(0).normal(size=(300, 20)).astype(np.float32)
    bias = (np.arange(300) % 7).astype(np.float32)
    zeros = np.zeros((1, 20), np.float32)
    check(head, zeros, 12)
    check(head, zeros, 60, bias)


def test_one_class() -> None:
    check(np.ones((1, 3), np.float32), np.ones((2, 3), np.float32), 1)


@pytest.mark.parametrize("k", [1, 128, 129, 2000])
def test_many_answers(k: int) -> None:
    rng = np.random.default_rng(k)
    check(rng.normal(size=(2000, 24)).astype(np.float32), rng.normal(size=(2, 24)).astype("f4"), k)


def test_more_candidates_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows so alike that hardly any can be ruled out."""
    del monkeypatch
    rng = np.random.default_rng(0)
    n = 3 * certified.CANDIDATES
    head = np.ones((n, 32)) + 1e-4 * rng.normal(size=(n, 32))
    check_order(head.astype(np.float32), np.ones((2, 32), np.float32), 5)


@examples
@given(shapes, seeds)
def test_approximate_scores_are_within_their_bounds(shape: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    spread = 10.0 ** rng.uniform(-30, 30, (shape[0], 1))
    head = (rng.normal(size=shape) * spread).astype(np.float32)
    hidden = (rng.normal(size=(2, shape[1])) ** 5).astype(np.float32)
    engine = Engine(layer(head, [[0]]))
    lists = engine._backend._lists  # type: ignore[attr-defined]
    rows = in_steps(lists, hidden)
    width, first, end = shape[1], lists.offsets[1], lists.offsets[2]
    sums = np.empty(shape[0] + EIGHT, np.int32)
    scores, marks = np.empty(shape[0]), np.empty(shape[0], np.uint8)
    scales, errors, lengths = (
        numbers[first:end] for numbers in (lists.scales, lists.errors, lists.lengths)
    )
    exact = by_numpy.all_scores(head, hidden)
    for b in range(2):
        row = bounded_products.bounds_of(rows, b)
        classes, n = lists.classes[first:end], shape[0]
        way = int16_products.way_for(width)
        int16_products.add_up(rows.x[b], way, lists.quantised, classes, n, width, True, sums)
        highest = exact[b].max()
        found = bounded_products.score_and_mark(
            sums, scales, errors, lengths, row, highest, scores, marks
        )
        bounds = [bounded_products.bound(lists, at, row) for at in range(first, end)]
        assert (np.abs(scores - exact[b]) <= bounds).all()
        assert found == marks.sum() >= 1 and marks[exact[b].argmax()]
        assert bounded_products.mark(scores, errors, lengths, row, highest, marks) == found


def in_steps(lists: ClassLists, hidden: Floats) -> bounded_products.QueryRows:
    n, width = hidden.shape
    x = np.empty((n, int16_products.bytes_for(width)), np.int8)
    rows = bounded_products.QueryRows(x, np.empty(n), np.empty(n), np.empty(n))
    for b in range(n):
        bounded_products.row_in_steps(hidden[b], lists.facts[LONGEST], b, rows)
    return rows


@examples
@given(st.integers(1, 300), st.integers(1, 40), seeds)
def test_all_ways_of_adding_up_are_the_plain_loop(width: int, n: int, seed: int) -> None:
    """In every bit, also where the sum of all products does not fit into 32."""
    rng = np.random.default_rng(seed)
    largest = int16_products.LARGEST_STEP
    table = rng.integers(-127, 128, (50, width)).astype(np.int8)
    whole = rng.integers(-largest, largest + 1, width).astype(np.int16)
    whole[rng.integers(width)] = rng.choice([-largest, largest])
    chosen = rng.integers(0, 50, n + 5).astype(np.int32)  # the last ones are not wanted yet
    wanted = (table[chosen[:n]].astype(np.int64) @ whole.astype(np.int64)).astype(np.int32)
    ways = [int16_products.PLAIN]
    if HAS_AVX2 and width >= WORDS:
        ways.append(int16_products.BY_AVX2)
    if HAS_VNNI and width >= BYTES:
        ways.append(int16_products.BY_VNNI)
    assert int16_products.way_for(width) == ways[-1]
    for way in ways:
        x = np.empty(int16_products.bytes_for(width), np.int8)
        sums = np.empty(n + EIGHT, np.int32)
        int16_products.lay_out(whole.astype(np.float32), 1.0, way, x)
        int16_products.add_up(x, way, table.reshape(-1), chosen, n, width, False, sums)
        assert sums[:n].tolist() == wanted.tolist()
        n_all, everything = len(table), np.arange(len(table), dtype="i4")
        sums = np.empty(n_all + EIGHT, np.int32)
        int16_products.add_up(x, way, table.reshape(-1), everything, n_all, width, True, sums)
        assert sums[chosen[:n]].tolist() == wanted.tolist()


def test_an_answer_does_not_depend_on_its_batch() -> None:
    rng = np.random.default_rng(0)
    head = rng.normal(size=(1500, 40)).astype(np.float32)
    hidden = (rng.normal(size=(70, 40)) ** 3).astype(np.float32)
    engine = Engine(layer(head, [[0]]))
    together = engine.topk(hidden, 10, mode=EXACT)
    in_threads = Engine(layer(head, [[0]]), threads=3).topk(hidden, 10, mode=EXACT)
    assert together.log_probs.tobytes() == in_threads.log_probs.tobytes()
    assert together.classes.tobytes() == in_threads.classes.tobytes()
    for row in range(len(hidden)):
        alone = engine.topk(hidden[row : row + 1], 10, mode=EXACT)
        assert alone.log_probs.tobytes() == together.log_probs[row].tobytes()
        assert alone.classes.tobytes() == together.classes[row].tobytes()


@given(st.integers(0, 60), seeds)
def test_candidates_are_sorted(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, places = rng.integers(-3, 3, n).astype(np.float64), rng.permutation(n)
    order = np.lexsort((places, -scores))
    wanted = scores[order], places[order]
    best.order(scores, places, n)
    assert scores.tolist() == wanted[0].tolist() and places.tolist() == wanted[1].tolist()


def test_rows_are_rounded_to_whole_steps() -> None:
    rng = np.random.default_rng(0)
    for width in (1, 15, 16, 17, 40, 47, 64, 65, 200):
        head = rng.normal(size=(3, width)).astype(np.float32)
        hidden = rng.normal(size=(1, width)).astype(np.float32)
        lists = Engine(layer(head, [[0]]))._backend._lists  # type: ignore[attr-defined]
        rows, sums = in_steps(lists, hidden), np.empty(3 + EIGHT, np.int32)
        way, table = int16_products.way_for(width), lists.quantised
        classes = np.arange(3, dtype=np.int32)
        int16_products.add_up(rows.x[0], way, table, classes, 3, width, True, sums)
        whole = np.rint(hidden[0].astype(np.float64) / rows.steps[0])
        assert np.abs(whole).max() <= int16_products.LARGEST_STEP
        assert sums[:3].tolist() == (table.reshape(3, width) @ whole).astype(int).tolist()


def test_the_first_expert_only_raises_the_threshold() -> None:
    """Where there are experts, exact answers are the same as without."""
    rng = np.random.default_rng(3)
    head = rng.normal(size=(2000, 32)).astype(np.float32)
    hidden = rng.normal(size=(20, 32)).astype(np.float32)
    few = [rng.choice(2000, 60, replace=False).tolist() for _ in range(4)]
    seeded = Engine(layer(head, few)).topk(hidden, 10, mode=EXACT)
    alone = Engine(layer(head, [[0]])).topk(hidden, 10, mode=EXACT)
    wanted = by_numpy.best(by_numpy.all_scores(head, hidden), 10)
    assert seeded.classes.tolist() == alone.classes.tolist() == wanted.tolist()
    np.testing.assert_allclose(seeded.log_probs, alone.log_probs, atol=1e-3)
    assert seeded.searched is not None and not seeded.searched.any()
    assert seeded.rungs is not None and {RUNGS[rung] for rung in seeded.rungs} == {"exact"}
    assert not seeded.expert_rows.any()
