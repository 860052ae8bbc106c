"""A layer of the head's own rows: its answers are the head's as far as experts were searched."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from trainer.layer.bias import logits
from trainer.layer.head_softmax import HeadSoftmax, keys_of, split_by_expert

D, K, N = 6, 4, 30


def random_layer(seed: int, *, biased: bool = False, kept: float = 0.4) -> HeadSoftmax:
    generator = torch.Generator().manual_seed(seed)
    columns = D + biased
    head = torch.randn(N, columns, generator=generator)
    gate = torch.randn(K, columns, generator=generator)
    held = torch.rand(K, N, generator=generator) < kept
    rest = 0.1 * torch.randn(K, D + 1, generator=generator)
    return HeadSoftmax(head, gate, keys_of(held), rest, biased=biased).eval()


def queries(seed: int, n: int = 40) -> Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("biased", [False, True])
def test_all_experts_give_the_full_softmax(biased: bool) -> None:
    layer, hidden = random_layer(1, biased=biased), queries(2)
    found = layer.topk(hidden, 5, experts=K)
    full = torch.log_softmax(logits(hidden, layer.head), dim=1).topk(5)
    assert torch.equal(found.classes, full.indices)
    torch.testing.assert_close(found.log_probs, full.values)


@pytest.mark.parametrize("seed", range(5))
def test_recall_never_falls_with_the_experts_searched(seed: int) -> None:
    layer, hidden = random_layer(seed), queries(seed + 100)
    full = logits(hidden, layer.head).topk(5).indices
    hits = []
    for experts in range(1, K + 1):
        found = layer.topk(hidden, 5, experts).classes
        hits.append((found[:, :, None] == full[:, None]).any(dim=2).sum(dim=1))
    for fewer, more in pairwise(hits):
        assert (more >= fewer).all()
    assert (hits[-1] == 5).all()


def test_a_class_scores_the_same_in_every_expert() -> None:
    layer, hidden = random_layer(3), queries(4, 10)
    scores = logits(hidden, layer.head)
    for number, classes in enumerate(split_by_expert(layer)):
        assert torch.equal(classes, layer.classes_of(number))
        own, _ = layer._scores(number, hidden, torch.rand(10), None)
        torch.testing.assert_close(own, scores[:, classes])


def test_probabilities_sum_to_one() -> None:
    layer = random_layer(5)
    assert torch.allclose(layer.log_prob(queries(6)).exp().sum(dim=1), torch.ones(40), atol=1e-5)


def test_the_normaliser_counts_what_is_estimated_outside() -> None:
    """Two classes with logits 1 and 2; the expert holds the first, and the rest says e^0.5."""
    head = torch.tensor([[1.0], [2.0]])
    rest = torch.tensor([[0.25, 0.25]])
    layer = HeadSoftmax(head, torch.ones(1, 1), torch.tensor([0]), rest)
    output = layer(torch.tensor([[1.0], [1.0]]), torch.tensor([0, 1])).output
    normaliser = torch.tensor([1.0, 0.5]).exp().sum().log()
    torch.testing.assert_close(output, torch.tensor([1.0, 2.0]) - normaliser)


def test_an_expert_of_all_classes_has_nothing_outside() -> None:
    layer = random_layer(7, kept=1.1)
    hidden = queries(8)
    torch.testing.assert_close(
        layer.log_prob(hidden), torch.log_softmax(logits(hidden, layer.head), dim=1)
    )


def test_more_answers_than_an_expert_holds_come_from_the_next_ones() -> None:
    layer, hidden = random_layer(9, kept=0.1), queries(10)
    found = layer.searched(hidden, 12, experts=1).isfinite().sum(dim=1)
    assert (found >= 12).all()
    assert (layer.topk(hidden, N).classes.sort(dim=1).values == torch.arange(N)).all()
