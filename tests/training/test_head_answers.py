"""What the full softmax answers, found without a copy of all its scores."""

import pytest
import torch
from torch import Tensor

from trainer.layer import DSSoftmax
from trainer.layer.bias import logits
from trainer.training.full_softmax import estimated_normalisers
from trainer.training.head_answers import (
    all_scores,
    destructive_logsumexp,
    head_answers,
    largest,
    rows_at_once,
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("n_classes", [10, 640, 4096, 4133, 10_001])
def test_the_largest_are_those_of_topk(n_classes: int) -> None:
    scores = random(50, n_classes)
    values, columns = largest(scores, 10)
    expected = scores.topk(10, dim=1)
    assert torch.equal(values, expected.values)
    assert torch.equal(columns, expected.indices)


def test_several_of_the_largest_in_one_block() -> None:
    scores = random(2, 64 * 70)
    scores[0, 5 : 64 * 70 : 70] = torch.arange(100.0, 164.0)  # all of block 5
    values, columns = largest(scores, 11)
    assert values[0].tolist() == list(range(163, 152, -1))
    assert (columns[0] % 70 == 5).all()


@pytest.mark.parametrize("biased", [False, True])
def test_answers_of_the_head(biased: bool) -> None:
    head, hidden = random(300, 8 + biased), random(700, 8, seed=1)
    labels = torch.arange(700) % 300
    found = head_answers(head, hidden, labels)
    scores = logits(hidden, head)
    assert torch.equal(found.best, scores.topk(10, dim=1).indices)
    expected = scores.log_softmax(dim=1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(found.log_prob, expected)
    right = [((scores.topk(k).indices == labels[:, None]).sum() / 700).item() for k in (1, 5, 10)]
    assert list(found.accuracy_at().values()) == pytest.approx(right)


def test_scores_of_many_classes_take_bounded_memory() -> None:
    for n_classes in (2, 1000, 10_000, 200_000, 5_000_000, 2**26):
        rows = rows_at_once(n_classes)
        assert rows == 1 or rows * n_classes <= 2**25
    assert rows_at_once(200_000) >= 128  # with few rows the head is read too often
    kept = [scores for _, scores in all_scores(random(9, 4), random(5000, 4), 5000, "")]
    assert len({scores.data_ptr() for scores in kept}) == 1


def test_the_logsumexp_of_large_scores() -> None:
    scores = torch.tensor([[1000.0, 1000.0], [-1000.0, -1001.0]])
    expected = scores.logsumexp(dim=1)
    torch.testing.assert_close(destructive_logsumexp(scores), expected)


def test_estimated_normalisers_are_near_the_exact_ones() -> None:
    """Two experts that hold the better half of the classes each; the rest is estimated."""
    head, hidden = random(6000, 8), 0.5 * random(500, 8, seed=1)
    gate = torch.zeros(2, 8)
    gate[0, 0], gate[1, 0] = 5.0, -5.0
    held = torch.stack([head[:, 0] > 0.3, head[:, 0] < -0.3])
    layer = DSSoftmax(8, 6000, 2, keys=held.flatten().nonzero()[:, 0])
    layer.gate.data = gate
    exact = logits(hidden, head).logsumexp(dim=1)
    found = estimated_normalisers(hidden, 500, head, layer, seed=0)
    errors = (found - exact).abs()
    assert errors.mean() < 0.02
    assert errors.quantile(0.95) < 0.1  # in others one class that is not held weighs most


def test_nothing_is_estimated_where_an_expert_holds_all() -> None:
    head, hidden = random(50, 4), random(20, 4, seed=1)
    found = estimated_normalisers(hidden, 20, head, DSSoftmax(4, 50, 3), seed=0)
    torch.testing.assert_close(found, logits(hidden, head).logsumexp(dim=1))
