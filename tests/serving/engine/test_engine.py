"""The engine against numpy, against itself one row at a time, and at its edges."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_bundle import rows_for
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from service import bundle, errors
from service.bundle import graphs
from service.engine import BackendName, Engine

N, D, K = 60, 12, 8


def make_bundle(
    path: Path,
    seed: int,
    sizes: list[int],
    precision: bundle.Precision = "fp32",
    biased: bool = False,
) -> bundle.Bundle:
    rng = np.random.default_rng(seed)
    classes = [np.sort(rng.choice(N, size, replace=False)) for size in sizes]
    return bundle.write(
        path,
        gate=rng.normal(size=(K, D)).astype(np.float32),
        weight=rng.normal(size=(sum(sizes), D)).astype(np.float32),
        offsets=np.cumsum([0, *sizes]),
        classes=np.concatenate(classes).astype(np.int32),
        n_classes=N,
        training=bundle.TrainingFacts(utilization=[1 / K] * K, flops_speedup=1.0),
        gate_bias=rng.normal(size=K).astype(np.float32) if biased else None,
        bias=rng.normal(size=sum(sizes)).astype(np.float32) if biased else None,
        precision=precision,
    )


SIZES = {
    "roomy": [20, 25, 30, 20, 40, 22, 21, 35],
    "tight": [3, 0, 10, 1, 60, 2, 5, 7],  # fewer than k classes, none, all
    "whole": [60] * K,
}


@pytest.fixture(scope="module", params=list(SIZES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bundle.Bundle:
    return make_bundle(tmp_path_factory.mktemp("engine") / "1", 7, SIZES[request.param])


@pytest.fixture(scope="module", params=["compiled", "onnx"])
def backend(request: pytest.FixtureRequest) -> BackendName:
    return request.param


@pytest.fixture(scope="module")
def pair(made: bundle.Bundle, backend: BackendName) -> tuple[bundle.Bundle, Engine]:
    return made, Engine(made, backend=backend)


@pytest.fixture(scope="module")
def hidden() -> NDArray[np.float32]:
    return np.random.default_rng(1).normal(size=(150, D)).astype(np.float32)


def weights(made: bundle.Bundle) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    gate = graphs.constants(made.gate_model)["U"].astype(np.float64)
    return gate, [made.expert_weight(expert).astype(np.float64) for expert in range(K)]


def reference(
    made: bundle.Bundle, row: NDArray[np.float32], k: int, experts: int
) -> list[tuple[int, float]]:
    """One row in float64, in plain loops: the rule of the answer, spelled out."""
    gate, expert_weights = weights(made)
    logits = gate @ row
    gates = np.exp(logits - logits.max())
    gates /= gates.sum()
    ranked = np.argsort(-gates, kind="stable")
    best: dict[int, float] = {}
    for rank, expert in enumerate(ranked):
        if rank >= experts and len(best) >= k:
            break
        scores = gates[ranked[0]] * (expert_weights[expert] @ row)
        absent = N - len(scores)
        normaliser = np.log(np.exp(scores).sum() + absent) if N > 0 else 0.0
        for cls, score in zip(made.expert_classes(expert).tolist(), scores, strict=True):
            value = score - normaliser + np.log(gates[expert] / gates[ranked[0]])
            best[cls] = max(best.get(cls, -np.inf), value)
    return sorted(best.items(), key=lambda item: (-item[1], item[0]))[:k]


@pytest.mark.parametrize("k", [1, 5, 60])
@pytest.mark.parametrize("experts", [1, 2, K])
def test_equals_the_rule_spelled_out(
    pair: tuple[bundle.Bundle, Engine], hidden: NDArray[np.float32], k: int, experts: int
) -> None:
    made, engine = pair
    answer = engine.topk(hidden[:40], k, experts)
    for row in range(40):
        expected = reference(made, hidden[row], k, experts)
        np.testing.assert_allclose(
            answer.log_probs[row], [value for _, value in expected], atol=2e-5
        )
        assert answer.classes[row].tolist() == [cls for cls, _ in expected]


@pytest.mark.parametrize("k", [1, 5, 60])
@pytest.mark.parametrize("experts", [1, 3])
def test_batched_equals_one_by_one_bit_for_bit(
    pair: tuple[bundle.Bundle, Engine], hidden: NDArray[np.float32], k: int, experts: int
) -> None:
    _, engine = pair
    together = engine.topk(hidden, k, experts)
    for row in range(len(hidden)):
        alone = engine.topk(hidden[row : row + 1], k, experts)
        assert np.array_equal(alone.classes[0], together.classes[row])
        assert np.array_equal(alone.log_probs[0], together.log_probs[row])
        assert alone.experts[0] == together.experts[row]
        assert alone.gates[0] == together.gates[row]


@given(st.integers(0, 1000), st.integers(1, 12), st.integers(1, 3))
def test_answers_are_sorted_distinct_and_below_one(
    tiny_engine: Engine, seed: int, k: int, experts: int
) -> None:
    rows = np.random.default_rng(seed).normal(size=(9, 4)).astype(np.float32)
    answer = tiny_engine.topk(rows, k, experts)
    assert answer.classes.shape == answer.log_probs.shape == (9, k)
    assert (answer.log_probs <= 0).all()
    assert (np.diff(answer.log_probs, axis=1) <= 0).all()
    assert all(len(set(row)) == k for row in answer.classes.tolist())


def test_one_expert_over_all_classes_is_a_softmax(tmp_path: Path, backend: BackendName) -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(30, 5)).astype(np.float32)
    made = bundle.write(
        tmp_path / "1",
        gate=np.ones((1, 5), np.float32),
        weight=weight,
        offsets=np.array([0, 30]),
        classes=np.arange(30, dtype=np.int32),
        n_classes=30,
        training=bundle.TrainingFacts(utilization=[1.0], flops_speedup=30 / 31),
    )
    rows = rng.normal(size=(10, 5)).astype(np.float32)
    answer = Engine(made, backend=backend).topk(rows, 30)
    np.testing.assert_allclose(np.exp(answer.log_probs).sum(axis=1), 1, atol=1e-5)
    assert np.array_equal(answer.classes, np.argsort(-(rows @ weight.T), axis=1, kind="stable"))
    assert np.array_equal(answer.gates, np.ones(10, np.float32))


def test_ties_go_by_class_id(tmp_path: Path, backend: BackendName) -> None:
    made = bundle.write(
        tmp_path / "1",
        gate=np.eye(2, 3, dtype=np.float32),
        weight=np.ones((8, 3), np.float32),
        offsets=np.array([0, 5, 8]),
        classes=np.array([1, 3, 5, 7, 9, 0, 2, 4], np.int32),
        n_classes=10,
        training=bundle.TrainingFacts(utilization=[0.5, 0.5], flops_speedup=1.0),
    )
    engine = Engine(made, backend=backend)
    rows = np.array([[1, 0, 0], [1, 1, 0]], np.float32)
    assert engine.topk(rows, 4).classes.tolist() == [[1, 3, 5, 7]] * 2
    # A row equally near both experts takes the lower one, and merges by score, then class id.
    answer = engine.topk(rows[1:], 8, experts=2)
    assert answer.experts.tolist() == [0]
    by_score: dict[float, list[int]] = {}
    for score, cls in zip(answer.log_probs[0].tolist(), answer.classes[0].tolist(), strict=True):
        by_score.setdefault(score, []).append(cls)
    assert all(classes == sorted(classes) for classes in by_score.values())


def test_huge_inputs_keep_finite_answers(tiny_engine: Engine) -> None:
    rows = rows_for(0, 1, 2) * np.float32(1e6)
    answer = tiny_engine.topk(rows, 12, experts=3)
    assert np.isfinite(answer.log_probs).all()


def test_runs_tell_what_was_computed(tiny_engine: Engine) -> None:
    answer = tiny_engine.topk(rows_for(0, 2, 2, 1, 0, 2), k=2)
    assert answer.experts.tolist() == [0, 2, 2, 1, 0, 2]
    assert answer.expert_rows.tolist() == [2, 1, 3]
    assert (answer.expert_seconds > 0).all() and answer.gate_seconds > 0
    # Two experts each: twice the rows.
    twice = tiny_engine.topk(rows_for(0, 2), k=2, experts=2)
    assert twice.expert_rows.sum() == 4


def test_only_short_rows_search_further(tiny_engine: Engine) -> None:
    """Expert 0 holds 5 classes, the others 4: at k = 5 only their rows need a second expert."""
    answer = tiny_engine.topk(rows_for(0, 1), k=5)
    assert answer.expert_rows.sum() == 3


def test_threads_get_the_same_answers(
    pair: tuple[bundle.Bundle, Engine], hidden: NDArray[np.float32]
) -> None:
    _, engine = pair
    expected = engine.topk(hidden, 5, 2)
    with ThreadPoolExecutor(4) as pool:
        for answer in pool.map(lambda _: engine.topk(hidden, 5, 2), range(40)):
            assert np.array_equal(answer.classes, expected.classes)
            assert np.array_equal(answer.log_probs, expected.log_probs)


ROW = np.zeros((1, 4), np.float32)


@pytest.mark.parametrize(
    ("rows", "k", "experts", "expected"),
    [
        (np.zeros((1, 5), np.float32), 1, 1, errors.WrongWidth),
        (np.zeros(4, np.float32), 1, 1, errors.WrongWidth),
        (np.zeros((1, 4, 1), np.float32), 1, 1, errors.WrongWidth),
        (np.zeros((0, 4), np.float32), 1, 1, errors.EmptyBatch),
        (np.full((1, 4), np.nan, np.float32), 1, 1, errors.NotFinite),
        (np.full((1, 4), -np.inf, np.float32), 1, 1, errors.NotFinite),
        (ROW, 0, 1, errors.KOutOfRange),
        (ROW, -1, 1, errors.KOutOfRange),
        (ROW, 13, 1, errors.KOutOfRange),
        (ROW, 1, 0, errors.ExpertsOutOfRange),
        (ROW, 1, 4, errors.ExpertsOutOfRange),
    ],
)
def test_bad_queries_are_named(
    tiny_engine: Engine,
    rows: NDArray[np.float32],
    k: int,
    experts: int,
    expected: type[errors.QueryError],
) -> None:
    with pytest.raises(expected) as refusal:
        tiny_engine.topk(rows, k, experts)
    assert refusal.type is expected
    assert str(refusal.value).endswith(".")
    assert tiny_engine.topk(ROW, 12).classes.shape == (1, 12)


def test_the_row_with_a_nan_is_named(tiny_engine: Engine) -> None:
    rows = np.zeros((5, 4), np.float32)
    rows[3, 1] = np.nan
    with pytest.raises(errors.NotFinite, match="Row 3"):
        tiny_engine.topk(rows, 1)
