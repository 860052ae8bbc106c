"""One row in its best expert has a call of its own: it answers as a batch does, bit for bit."""

import numpy as np
import pytest
from helpers.fidelity_layer import Floats, layer, some_experts
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from service.engine import Engine
from service.engine.kernels import small_lists
from service.errors import KOutOfRange, NotFinite, WrongWidth
from service.topk import TopK

N, D, K = 3000, 72, 5


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Its experts hold 1 to 1500 classes: small lists, large ones, and one with a single class."""
    rng = np.random.default_rng(0)
    head = rng.normal(size=(N, D)).astype(np.float32)
    head[1::3] = head[::3]  # equal rows have equal scores
    rest = rng.normal(size=(K, D + 1)).astype(np.float32)
    experts = [*some_experts(N, K - 2, 4), [7], sorted(range(0, N, 2))]
    return Engine(layer(head, experts, rest=rest))


@pytest.fixture(scope="module")
def hidden() -> Floats:
    return np.random.default_rng(1).normal(size=(60, D)).astype(np.float32)


def same(one: TopK, batch: TopK, row: int) -> bool:
    return all(
        getattr(one, name)[0].tobytes() == getattr(batch, name)[row].tobytes()
        for name in ("classes", "log_probs", "experts", "gates")
    )


@pytest.mark.parametrize("k", [1, 2, 10, 100])
def test_it_answers_as_a_batch_does(engine: Engine, hidden: Floats, k: int) -> None:
    batch = engine.topk(hidden, k)
    assert len(set(batch.experts.tolist())) == K
    for row in range(len(hidden)):
        one = engine.topk(hidden[row : row + 1], k)
        assert same(one, batch, row)
        e = one.experts[0]
        if engine.expert_sizes[e] >= k:
            assert one.expert_rows.tolist() == np.eye(K, dtype=int)[e].tolist()
        assert (one.expert_seconds > 0).tolist() == (one.expert_rows > 0).tolist()
        assert one.gate_seconds > 0


def test_rows_may_lie_anywhere(engine: Engine, hidden: Floats) -> None:
    batch = engine.topk(hidden, 10)
    apart = np.repeat(hidden, 2, axis=1)[:, ::2]
    unaligned: NDArray[np.float32] = np.frombuffer(b"\0" + hidden.tobytes(), np.uint8)[1:].view(
        "f4"
    )
    unaligned = unaligned.reshape(hidden.shape)
    assert not unaligned.flags.aligned and not apart.flags.c_contiguous
    for row in range(0, len(hidden), 7):
        for rows in (apart, unaligned, np.asfortranarray(hidden), hidden.astype(np.float64)):
            assert same(engine.topk(rows[row : row + 1], 10), batch, row)


def test_what_is_wrong_is_said(engine: Engine, hidden: Floats) -> None:
    for number in (np.nan, np.inf, -np.inf):
        row = hidden[:1].copy()
        row[0, D - 1] = number
        with pytest.raises(NotFinite):
            engine.topk(row, 10)
    with pytest.raises(WrongWidth):
        engine.topk(hidden[:1, 1:], 10)
    with pytest.raises(WrongWidth):
        engine.topk(hidden[0], 10)
    for k in (0, N + 1):
        with pytest.raises(KOutOfRange):
            engine.topk(hidden[:1], k)


def test_answers_share_nothing_that_can_be_written_to(engine: Engine, hidden: Floats) -> None:
    one, other = engine.topk(hidden[:1], 10), engine.topk(hidden[:1], 10)
    for mine, yours in zip(one, other, strict=True):
        if isinstance(mine, np.ndarray) and np.shares_memory(mine, yours):
            assert not mine.flags.writeable


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**32 - 1), st.booleans())
def test_the_threshold_is_reached_by_k(n: int, k: int, seed: int, whole: bool) -> None:
    rng = np.random.default_rng(seed)
    k = min(k, n)
    numbers = rng.normal(size=n) ** 5
    if whole:
        numbers = np.rint(numbers)
    threshold = small_lists.least_of_best(numbers, k)
    assert (numbers >= threshold).sum() >= k
