"""Accuracy bundles that ship their head: candidates ranked by it, and exact answers."""

from pathlib import Path

import numpy as np
import pytest
from helpers import fidelity_layer as by_numpy
from helpers.fidelity_layer import Floats
from numpy.typing import NDArray

from service import bundle
from service.engine import Engine
from service.engine.engine import CANDIDATES_AT_LEAST
from service.errors import NoHead, RescoreUnsuitable
from service.topk import RUNGS, Mode

N, D, K = 400, 16, 4
RESCORE, EXACT = Mode(rescore=True), Mode(exact=True)


@pytest.fixture(scope="module")
def head() -> Floats:
    return np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)


@pytest.fixture(scope="module")
def hidden() -> Floats:
    return np.random.default_rng(1).normal(size=(60, D)).astype(np.float32)


@pytest.fixture(scope="module", params=["fp32", "fp16", "int8"])
def made(
    request: pytest.FixtureRequest, head: Floats, tmp_path_factory: pytest.TempPathFactory
) -> bundle.Bundle:
    """Experts of 150 classes with rows that are about the head's."""
    rng = np.random.default_rng(2)
    classes = np.concatenate([np.sort(rng.choice(N, 150, replace=False)) for _ in range(K)])
    return bundle.write(
        tmp_path_factory.mktemp("accuracy") / "1",
        gate=rng.normal(size=(K, D)).astype(np.float32),
        weight=(head[classes] + 0.3 * rng.normal(size=(len(classes), D))).astype(np.float32),
        offsets=np.arange(0, K * 150 + 1, 150),
        classes=classes.astype(np.int32),
        n_classes=N,
        training=bundle.TrainingFacts(utilization=[0.25] * K, flops_speedup=2.0),
        head=head,
        head_bias=rng.normal(size=N).astype(np.float32),
        precision=request.param,
    )


def scores_of(made: bundle.Bundle, hidden: Floats) -> NDArray[np.float64]:
    assert made.rows is not None
    return by_numpy.all_scores(made.rows.weights, hidden, made.rows.bias)


@pytest.mark.parametrize(("k", "experts"), [(1, 1), (10, 1), (20, 2), (30, 4)])
def test_candidates_are_ranked_by_the_head(
    made: bundle.Bundle, hidden: Floats, k: int, experts: int
) -> None:
    engine = Engine(made)
    answer = engine.topk(hidden, k, experts, RESCORE)
    candidates = engine.topk(hidden, max(4 * k, CANDIDATES_AT_LEAST), experts)
    scores = scores_of(made, hidden)
    for row in range(len(hidden)):
        found = candidates.classes[row]
        ranked = sorted(found.tolist(), key=lambda c: (-scores[row, c], c))
        assert answer.classes[row].tolist() == ranked[:k]
        # The head's scores share what the layer gives to the candidates together, at most 1.
        given = min(by_numpy.logsumexp(candidates.log_probs[row].astype(np.float64)), 0.0)
        log_probs = scores[row, ranked[:k]] - by_numpy.logsumexp(scores[row, found]) + given
        np.testing.assert_allclose(answer.log_probs[row], log_probs, rtol=1e-5, atol=1e-5)
    assert (np.exp(answer.log_probs.astype(np.float64)).sum(axis=1) <= 1 + 1e-6).all()
    assert answer.rungs is not None and {RUNGS[rung] for rung in answer.rungs} == {"sparse"}
    assert answer.searched is not None and answer.searched.tolist() == [experts] * len(hidden)
    assert answer.expert_rows.sum() == experts * len(hidden)
    assert engine.row_scores(k, experts, RESCORE) > engine.row_scores(k, experts)


def test_more_of_the_heads_answers_are_kept(made: bundle.Bundle, hidden: Floats) -> None:
    engine, best = Engine(made), by_numpy.best(scores_of(made, hidden), 10)

    def recall(classes: NDArray[np.int64]) -> float:
        return float((classes[:, :, None] == best[:, None]).any(axis=2).mean())

    assert recall(engine.topk(hidden, 10, 2, RESCORE).classes) > recall(
        engine.topk(hidden, 10, 2).classes
    )


def test_experts_that_hold_few_classes(tmp_path: Path, head: Floats, hidden: Floats) -> None:
    """Further ones are searched for answers, not for candidates."""
    made = bundle.write(
        tmp_path / "1",
        gate=np.random.default_rng(0).normal(size=(40, D)).astype(np.float32),
        weight=head,
        offsets=np.arange(0, N + 1, 10),
        classes=np.arange(N, dtype=np.int32),
        n_classes=N,
        training=bundle.TrainingFacts(utilization=[1 / 40] * 40, flops_speedup=2.0),
        head=head,
    )
    for backend in ("compiled", "onnx"):
        engine = Engine(made, backend=backend)  # type: ignore[arg-type]
        answer = engine.topk(hidden, 5, mode=RESCORE)
        assert answer.expert_rows.sum() == len(hidden)
        more = engine.topk(hidden, 15, mode=RESCORE)
        assert more.expert_rows.sum() == 2 * len(hidden)
        assert (more.classes >= 0).all() and np.isfinite(more.log_probs).all()


@pytest.mark.parametrize("backend", ["compiled", "onnx"])
def test_exact_answers(made: bundle.Bundle, hidden: Floats, backend: str) -> None:
    engine = Engine(made, backend=backend)  # type: ignore[arg-type]
    assert engine.can_exact and engine.objective == "accuracy" and engine.contract is None
    answer = engine.topk(hidden, 10, mode=EXACT)
    scores = scores_of(made, hidden)
    best = by_numpy.best(scores, 10)
    assert answer.classes.tolist() == best.tolist()
    wanted = np.take_along_axis(scores, best, axis=1) - by_numpy.logsumexp(scores)[:, None]
    np.testing.assert_allclose(answer.log_probs, wanted, atol=0.02)
    usual = engine.topk(hidden, 10)
    assert answer.experts.tolist() == usual.experts.tolist()
    np.testing.assert_allclose(answer.gates, usual.gates, rtol=1e-5)
    assert not answer.expert_rows.any()
    assert engine.topk(hidden[:1], N, mode=EXACT).classes.shape == (1, N)  # also unreachable ones


def test_a_head_that_was_not_read(made: bundle.Bundle, hidden: Floats) -> None:
    engine = Engine(bundle.read(made.path))
    assert not engine.can_exact
    with pytest.raises(NoHead, match="load_heads"):
        engine.topk(hidden, 1, mode=EXACT)


def test_a_bundle_without_head(tmp_path: Path, head: Floats, hidden: Floats) -> None:
    made = bundle.write(
        tmp_path / "1",
        gate=np.ones((1, D), np.float32),
        weight=head,
        offsets=np.array([0, N]),
        classes=np.arange(N, dtype=np.int32),
        n_classes=N,
        training=bundle.TrainingFacts(utilization=[1.0], flops_speedup=1.0),
    )
    for mode in (RESCORE, EXACT, Mode(recall=1.0)):
        with pytest.raises(NoHead, match="export it with --head"):
            Engine(made).check(hidden, 1, mode=mode)


def test_fidelity_bundles_need_no_rescoring(head: Floats, hidden: Floats) -> None:
    engine = Engine(by_numpy.layer(head, [range(10), range(20)]))
    with pytest.raises(RescoreUnsuitable, match="its head's own already"):
        engine.topk(hidden, 1, mode=RESCORE)
