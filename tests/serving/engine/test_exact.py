"""Exact answers are those of float64 over all classes, whatever the numbers."""

import numpy as np
import pytest
from helpers import fidelity_layer as by_numpy
from helpers.fidelity_layer import Floats, layer
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine import Engine
from service.engine.kernels import bounded_products, certified
from service.topk import RUNGS, Mode

EXACT = Mode(exact=True)
shapes = st.tuples(st.integers(1, 700), st.sampled_from([1, 2, 15, 16, 17, 31, 32, 40, 100]))
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
    rows = bounded_products.in_steps(lists, hidden)
    sums, scores = np.empty(shape[0] + 3, np.int32), np.empty(shape[0])
    first, end = lists.offsets[1], lists.offsets[2]
    exact = by_numpy.all_scores(head, hidden)
    for b in range(2):
        bounded_products.add_up(lists, rows.x[b], shape[1], first, end, end, sums)
        scales, errors, lengths = (
            numbers[first:end] for numbers in (lists.scales, lists.errors, lists.lengths)
        )
        bounded_products.fill_in_scores(sums, scales, lists.biases, rows.steps[b], scores)
        bounds = [bounded_products.bound(lists, at, rows, b) for at in range(first, end)]
        assert (np.abs(scores - exact[b]) <= bounds).all()
        numbers = scores, errors, lengths, rows.lengths[b], rows.remainders[b]
        assert bounded_products.reaching(*numbers, exact[b].max()) >= 1


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
    certified.sort(scores, places, n)
    assert scores.tolist() == wanted[0].tolist() and places.tolist() == wanted[1].tolist()


def test_the_plain_loop_adds_as_the_vectors_do() -> None:
    rng = np.random.default_rng(0)
    for width in (1, 15, 16, 17, 40, 47, 64):
        row = rng.integers(-127, 128, width).astype(np.int8)
        hidden = rng.normal(size=(1, width)).astype(np.float32)
        rows = bounded_products.QueryRows(
            np.zeros((1, bounded_products.words_of(width)), np.int16),
            np.empty(1), np.empty(1), np.empty(1),
        )  # fmt: skip
        bounded_products.row_in_steps(hidden[0], 1.0, 0, rows)
        step = rows.steps[0]
        total = bounded_products.int_dot(rows.x[0], row)
        whole = np.rint(hidden[0].astype(np.float64) / step)
        assert total == int((whole * row).sum())
