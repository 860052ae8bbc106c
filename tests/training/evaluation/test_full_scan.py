import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.arrays import Head
from trainer.evaluation import full_scan as fullscan
from trainer.evaluation.full_scan import LogitsOverflow, full_scan, full_topk


def random_head(rng: np.random.Generator, n_classes: int, *, biased: bool) -> Head:
    weight = rng.normal(size=(n_classes, 8)).astype(np.float32)
    return Head(weight, rng.normal(size=n_classes).astype(np.float32) if biased else None)


@given(
    st.lists(st.lists(st.integers(-2, 2), min_size=6, max_size=6), min_size=1, max_size=5),
    st.integers(1, 6),
)
def test_topk_is_a_stable_sort_however_many_classes_are_tied(
    logits: list[list[int]], k: int
) -> None:
    rows = np.array(logits, np.float32)
    expected = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    assert full_topk(rows, Head(np.eye(6, dtype=np.float32), None), k).tolist() == expected.tolist()


def test_the_bias_counts() -> None:
    head = Head(np.eye(3, dtype=np.float32), np.array([0, 0, 5], np.float32))
    assert full_topk(np.array([[3, 2, 1]], np.float32), head, 3).tolist() == [[2, 0, 1]]


def test_few_rows_at_once_give_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    head, hidden = random_head(rng, 50, biased=True), rng.normal(size=(7, 8)).astype(np.float32)
    expected = full_topk(hidden, head, 5)
    monkeypatch.setattr(fullscan, "LOGITS_AT_ONCE", 100)
    assert fullscan.rows_at_once(50) == 2 and fullscan.rows_at_once(1000) == 1
    assert full_topk(hidden, head, 5).tolist() == expected.tolist()


def test_logits_beyond_float32_are_refused() -> None:
    head = Head(np.full((3, 2), 1e30, np.float32), None)
    with pytest.raises(LogitsOverflow):
        full_topk(np.array([[1e30, 1e30]], np.float32), head, 1)
    with pytest.raises(LogitsOverflow):  # inf - inf
        full_topk(np.array([[1e30, -1e30]], np.float32), head, 1)


@pytest.mark.parametrize("biased", [False, True])
def test_the_timed_scan_gives_the_same_classes(biased: bool) -> None:
    rng = np.random.default_rng(1)
    head = random_head(rng, 100, biased=biased)
    hidden = rng.normal(size=(20, 8)).astype(np.float32)
    scan = full_scan(head, 10)
    assert scan is not None
    assert scan(hidden).tolist() == full_topk(hidden, head, 10).tolist()


def test_a_head_that_no_onnx_model_can_hold_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    head = random_head(np.random.default_rng(0), 10, biased=False)
    monkeypatch.setattr(fullscan, "LARGEST_MODEL", head.weight.nbytes - 1)
    assert full_scan(head, 1) is None
