"""Experts that have the head's own rows: the dial only goes up, and all of them are exact."""

from pathlib import Path

import numpy as np
import pytest
from helpers import fidelity_layer as by_numpy
from helpers.fidelity_layer import Floats, layer, some_experts, write_fidelity
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from service import bundle
from service.engine import Engine
from service.topk import Mode

EXACT = Mode(exact=True)
N, D, K = 300, 24, 6
examples = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def made(seed: int, biased: bool = False) -> tuple[bundle.Bundle, Floats, Floats]:
    rng = np.random.default_rng(seed)
    head = rng.normal(size=(N, D)).astype(np.float32)
    head[N // 2 :: 7] = head[: len(head[N // 2 :: 7])]  # some are equal
    bias = rng.normal(size=N).astype(np.float32) if biased else None
    rest = rng.normal(size=(K, D + 1)).astype(np.float32)
    hidden = rng.normal(size=(12, D)).astype(np.float32)
    return layer(head, some_experts(N, K, seed), bias=bias, rest=rest), head, hidden


def reference(
    found: bundle.Bundle, head: Floats, hidden: Floats, k: int, g: int
) -> tuple[list[list[int]], NDArray[np.float64]]:
    """What the format says, in float64: classes, and log-probabilities [B,k]."""
    assert found.rows is not None and found.rest is not None
    scores = by_numpy.all_scores(head, hidden, found.rows.bias)
    ranks = np.argsort(-by_numpy.gates(found, hidden), axis=1, kind="stable")
    classes, log_probs = [], []
    for row, h, ranked in zip(scores, hidden.astype(np.float64), ranks, strict=True):
        held: list[int] = []
        searched = 0
        while searched < g or (len(set(held)) < k and searched < K and len(held) < N):
            held += found.expert_classes(ranked[searched]).tolist()
            searched += 1
        if g == K or len(held) >= N or len(set(held)) < k:
            held, log_z = list(range(N)), by_numpy.logsumexp(row)
        else:
            own = [by_numpy.logsumexp(row[found.expert_classes(e)]) for e in ranked[:searched]]
            e = ranked[int(np.argmax(own))]
            log_z = np.logaddexp(max(own), found.rest[e] @ [*h, 1.0])
        chosen = sorted(set(held), key=lambda c: (-row[c], c))[:k]
        classes.append(chosen)
        log_probs.append(row[chosen] - log_z)
    return classes, np.array(log_probs)


@examples
@given(seeds, st.sampled_from([1, 3, 10, 60, 200, N]), st.integers(1, K), st.booleans())
def test_answers_are_what_the_format_says(seed: int, k: int, g: int, biased: bool) -> None:
    found, head, hidden = made(seed, biased)
    answer = Engine(found).topk(hidden, k, g)
    classes, log_probs = reference(found, head, hidden, k, g)
    assert answer.classes.tolist() == classes
    np.testing.assert_allclose(answer.log_probs, log_probs, atol=0.1)  # Z is of int8 scores
    assert answer.searched is None and answer.rungs is None


@examples
@given(seeds, st.sampled_from([1, 5, 20]))
def test_recall_only_grows_with_experts_and_all_of_them_are_exact(seed: int, k: int) -> None:
    found, head, hidden = made(seed)
    engine = Engine(found)
    exact = by_numpy.best(by_numpy.all_scores(head, hidden), k)
    recall = [0.0] * len(hidden)
    for g in range(1, K + 1):
        classes = engine.topk(hidden, k, g).classes
        kept = [len({*row} & {*best}) / k for row, best in zip(classes, exact, strict=True)]
        assert all(now >= before for now, before in zip(kept, recall, strict=True))
        recall = kept
    assert recall == [1.0] * len(hidden)
    assert engine.topk(hidden, k, K).classes.tolist() == exact.tolist()


def test_all_experts_are_the_exact_scan() -> None:
    rng = np.random.default_rng(0)
    head = rng.normal(size=(90, D)).astype(np.float32)
    engine = Engine(layer(head, [range(0, 30), range(30, 60), range(60, 80)]))
    hidden = rng.normal(size=(20, D)).astype(np.float32)
    everywhere, exact = engine.topk(hidden, 7, 3), engine.topk(hidden, 7, mode=EXACT)
    assert everywhere.classes.tobytes() == exact.classes.tobytes()
    assert everywhere.log_probs.tobytes() == exact.log_probs.tobytes()
    assert not everywhere.expert_rows.any()  # a scan is no expert's


def test_a_case_worked_by_hand() -> None:
    head = np.array([[1, 0], [0, 1], [1, 1], [-1, 0], [2, 2]], np.float32)
    gate = np.array([[1, 0], [0, 1]], np.float32)
    rest = np.array([[0, 0, -1], [0, 0.5, 0]], np.float32)
    engine = Engine(layer(head, [[0, 2, 3], [1, 4]], gate=gate, rest=rest))
    answer = engine.topk(np.array([[2, 1]], np.float32), 2)
    # The gate says 2 and 1, so expert 0. Scores 2, 3, -2; all other classes e^-1 together.
    assert answer.experts.tolist() == [0]
    assert answer.classes.tolist() == [[2, 0]]
    log_z = np.log(np.exp(3) + np.exp(2) + np.exp(-2) + np.exp(-1))
    np.testing.assert_allclose(answer.log_probs, [[3 - log_z, 2 - log_z]], atol=1e-2)
    both = engine.topk(np.array([[2, 1]], np.float32), 2, 2)
    assert both.classes.tolist() == [[4, 2]]  # 6 and 3
    all_z = np.log(np.exp([2, 1, 3, -2, 6]).sum())
    np.testing.assert_allclose(both.log_probs, [[6 - all_z, 3 - all_z]], atol=1e-2)
    alone = engine.topk(np.array([[1, 2]], np.float32), 2)
    assert alone.experts.tolist() == [1] and alone.classes.tolist() == [[4, 1]]
    log_z = np.log(np.exp(6) + np.exp(2) + np.exp(0.5 * 2))
    np.testing.assert_allclose(alone.log_probs, [[6 - log_z, 2 - log_z]], atol=1e-2)


def test_an_answer_does_not_depend_on_its_batch() -> None:
    found, _, _ = made(1)
    hidden = np.random.default_rng(2).normal(size=(100, D)).astype(np.float32)
    for k, g in ((10, 1), (10, 3), (150, 1)):
        together = Engine(found).topk(hidden, k, g)
        threads = Engine(found, threads=2).topk(hidden, k, g)
        assert threads.log_probs.tobytes() == together.log_probs.tobytes()
        assert threads.expert_rows.tolist() == together.expert_rows.tolist()
        for row in range(0, 100, 9):
            alone = Engine(found).topk(hidden[row : row + 1], k, g)
            assert alone.classes.tobytes() == together.classes[row].tobytes()
            assert alone.log_probs.tobytes() == together.log_probs[row].tobytes()


def test_work_is_counted_by_expert() -> None:
    found, _, hidden = made(3)
    answer = Engine(found).topk(hidden, 1, 2)
    assert answer.expert_rows.sum() == 2 * len(hidden)
    assert (answer.expert_seconds[answer.expert_rows > 0] > 0).all()
    assert answer.gate_seconds > 0
    ranks = np.argsort(-by_numpy.gates(found, hidden), axis=1)
    assert answer.experts.tolist() == ranks[:, 0].tolist()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("k", "g"), [(1, 1), (5, 1), (5, 3), (40, 1), (60, 2), (3, 4)])
def test_onnx_runtime_answers_the_same(tmp_path: Path, biased: bool, k: int, g: int) -> None:
    written = write_fidelity(tmp_path / "1", biased=biased)
    hidden = np.random.default_rng(5).normal(size=(50, 20)).astype(np.float32)
    compiled = Engine(written).topk(hidden, k, g)
    sessions = Engine(written, backend="onnx").topk(hidden, k, g)
    assert compiled.classes.tolist() == sessions.classes.tolist()
    np.testing.assert_allclose(compiled.log_probs, sessions.log_probs, atol=0.1)
    assert compiled.expert_rows.tolist() == sessions.expert_rows.tolist()
    assert compiled.experts.tolist() == sessions.experts.tolist()


def test_cost_of_a_row() -> None:
    engine = Engine(layer(np.eye(40, 8, dtype=np.float32), [range(10), range(20), range(40)]))
    assert engine.n_reachable == 40
    assert engine.row_scores(5, 1) == 3 + 40 + 5
    assert engine.row_scores(5, 3) == 3 + 40 + 15  # not the 70 that the experts hold
    assert engine.row_scores(5, 1, EXACT) == 3 + 40 + 5
    assert engine.row_scores(5, 1, Mode(recall=0.9)) == 3 + 40 + 5 + 40
