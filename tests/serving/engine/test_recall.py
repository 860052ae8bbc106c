"""Promises of recall: which rows are answered exactly, by a reference in numpy."""

import numpy as np
import pytest
from helpers import fidelity_layer as by_numpy
from helpers.fidelity_layer import Floats, a_contract, layer, some_experts
from numpy.typing import NDArray

from service import bundle
from service.bundle.contract import Contract
from service.engine import Engine
from service.errors import KOutOfRange, ModesConflict, NoContract, RecallOutOfRange
from service.topk import RUNGS, Mode, TopK

N, D, K = 200, 24, 5
SPARSE, ESCALATED, EXACT = range(len(RUNGS))


@pytest.fixture(scope="module")
def hidden() -> Floats:
    return np.random.default_rng(1).normal(size=(300, D)).astype(np.float32)


def made(contract: Contract | None, seed: int = 0) -> tuple[bundle.Bundle, Floats]:
    rng = np.random.default_rng(seed)
    head = (0.4 * rng.normal(size=(N, D))).astype(np.float32)
    rest = (0.3 * rng.normal(size=(K, D + 1))).astype(np.float32)
    return layer(head, some_experts(N, K, 3), rest=rest, contract=contract), head


def features(
    found: bundle.Bundle, head: Floats, hidden: Floats, k: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Those of models/FORMAT.md [B,8], and the rows' experts; NaN where an expert is too small."""
    assert found.rest is not None
    scores, gates = by_numpy.all_scores(head, hidden), by_numpy.gates(found, hidden)
    ranks = np.argsort(-gates, axis=1)
    rows = []
    for row, h, gate, ranked in zip(scores, hidden.astype(np.float64), gates, ranks, strict=True):
        held = found.expert_classes(ranked[0])
        z = -np.sort(-row[held])
        if len(z) < k:
            rows.append([np.nan] * 8)
            continue
        rest = found.rest[ranked[0]] @ [*h, 1.0]
        log_z = np.logaddexp(by_numpy.logsumexp(z), rest)
        described = [
            1.0,
            rest - log_z,
            z[0] - log_z,
            z[k - 1] - log_z,
            rest - z[k - 1],
            np.log(gate[ranked[0]]),
            np.clip(np.log(gate[ranked[1]] / gate[ranked[0]]), -20, 0),
            np.clip(z[0] - z[1], 0, 20) if k > 1 else 0.0,
        ]
        rows.append(np.clip(described, -30, 30).tolist())
    return np.array(rows), ranks[:, 0]


@pytest.mark.parametrize("k", [1, 2, 5])
def test_features_are_those_of_the_format(hidden: Floats, k: int) -> None:
    found, head = made(None)
    described, answer = Engine(found).recall_features(hidden, k)
    wanted, experts = features(found, head, hidden, k)
    assert answer.experts.tolist() == experts.tolist()
    np.testing.assert_allclose(described, wanted, atol=0.03)  # Z is of int8 scores
    assert described.dtype == np.float32
    usual = Engine(found).topk(hidden, k)
    assert answer.classes.tolist() == usual.classes.tolist()


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("recall", [0.4, 0.5, 0.7, 0.9])
def test_difficult_rows_are_escalated(hidden: Floats, k: int, recall: float) -> None:
    contract = a_contract(K)
    found, head = made(contract)
    engine = Engine(found)
    described, usual = engine.recall_features(hidden, k)
    entry, level = (0 if k == 1 else 1), (0 if recall <= 0.5 else 1)
    weights, of_experts = contract.weights[entry], contract.experts[entry]
    difficulty = described.astype(np.float64) @ weights + np.take(of_experts, usual.experts)
    threshold = contract.thresholds[entry][level]
    escalated = ~(difficulty <= threshold)  # also where there are no features
    answer = engine.topk(hidden, k, mode=Mode(recall=recall))
    assert answer.rungs is not None and answer.searched is not None
    assert 0 < escalated.sum() < len(hidden)
    assert answer.rungs.tolist() == np.where(escalated, ESCALATED, SPARSE).tolist()
    assert answer.searched.tolist() == [1] * len(hidden)
    exact = by_numpy.best(by_numpy.all_scores(head, hidden), k)
    assert (answer.classes[escalated] == exact[escalated]).all()
    assert (answer.classes[~escalated] == usual.classes[~escalated]).all()
    exactly = engine.topk(hidden, k, mode=Mode(exact=True))
    np.testing.assert_allclose(answer.log_probs[escalated], exactly.log_probs[escalated], atol=1e-5)


@pytest.mark.parametrize(("recall", "k"), [(0.95, 3), (0.995, 3), (0.5, 6), (1.0, 1)])
def test_a_promise_beyond_the_calibration_is_kept_by_a_scan(
    hidden: Floats, recall: float, k: int
) -> None:
    found, head = made(a_contract(K))
    answer = Engine(found).topk(hidden, k, mode=Mode(recall=recall))
    assert answer.rungs is not None and answer.rungs.tolist() == [EXACT] * len(hidden)
    assert answer.searched is not None and not answer.searched.any()
    exact = by_numpy.best(by_numpy.all_scores(head, hidden), k)
    assert answer.classes.tolist() == exact.tolist()


def test_an_expert_that_is_too_small_is_never_enough(hidden: Floats) -> None:
    head = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
    gate = np.zeros((2, D), np.float32)
    gate[0, 0], gate[1, 0] = 1, -1
    easy = a_contract(2).model_copy(update={"thresholds": [[1e9, 1e9, 1e9]] * 2})
    engine = Engine(layer(head, [range(3), range(50)], gate=gate, contract=easy))
    answer = engine.topk(hidden, 4, mode=Mode(recall=0.5))
    small = hidden[:, 0] > 0
    assert answer.rungs is not None
    assert answer.rungs.tolist() == np.where(small, ESCALATED, SPARSE).tolist()
    assert np.isnan(engine.recall_features(hidden, 4)[0][small]).all()
    assert answer.expert_rows.sum() == len(hidden)  # no further expert was searched


def test_a_row_does_not_depend_on_its_batch(hidden: Floats) -> None:
    engine = Engine(made(a_contract(K))[0])
    mode = Mode(recall=0.9)
    together = engine.topk(hidden, 5, mode=mode)
    in_threads = Engine(made(a_contract(K))[0], threads=2).topk(hidden, 5, mode=mode)
    _same(together, in_threads)
    for row in range(0, 300, 13):
        alone = engine.topk(hidden[row : row + 1], 5, mode=mode)
        assert alone.log_probs.tobytes() == together.log_probs[row].tobytes()
        assert alone.rungs is not None and together.rungs is not None
        assert alone.rungs[0] == together.rungs[row]


def _same(one: TopK, other: TopK) -> None:
    for name in ("classes", "log_probs", "searched", "rungs", "expert_rows"):
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes()


def test_what_is_refused() -> None:
    hidden = np.ones((1, D), np.float32)
    engine = Engine(made(a_contract(K))[0])
    with pytest.raises(RecallOutOfRange, match=r"recall is 1\.2; a share above 0 and up to 1 is"):
        engine.check(hidden, 1, mode=Mode(recall=1.2))
    for recall in (0.0, -1.0, float("nan")):
        with pytest.raises(RecallOutOfRange):
            engine.topk(hidden, 1, mode=Mode(recall=recall))
    with pytest.raises(NoContract, match="no calibration for recall"):
        Engine(made(None)[0]).check(hidden, 1, mode=Mode(recall=0.9))
    for mode in (Mode(True, 0.9), Mode(True, rescore=True), Mode(recall=0.9, rescore=True)):
        with pytest.raises(ModesConflict, match="Only one"):
            engine.check(hidden, 1, mode=mode)
    for mode in (Mode(exact=True), Mode(recall=0.9)):
        with pytest.raises(ModesConflict, match="leave experts out"):
            engine.check(hidden, 1, 2, mode)
    with pytest.raises(KOutOfRange):
        engine.check(hidden, N + 1, mode=Mode(exact=True))


def test_one_expert_is_all_of_them() -> None:
    """So everything is scanned, and there is no second gate value."""
    head = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    engine = Engine(layer(head, [range(20)], contract=a_contract(1)))
    hidden = np.ones((1, 8), np.float32)
    answer = engine.topk(hidden, 5, mode=Mode(recall=0.5))
    assert answer.classes.tolist() == by_numpy.best(by_numpy.all_scores(head, hidden), 5).tolist()
