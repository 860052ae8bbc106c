import pytest
import torch
from torch import nn

from trainer.layer import DSSoftmax
from trainer.layer.pruning import keep_one_copy, prune, rows_above, shrink


def layer_with_norms(norms: list[list[float]]) -> DSSoftmax:
    """Experts x classes, each row of four equal values: its root mean square is that value."""
    layer = DSSoftmax(4, len(norms[0]), len(norms))
    for expert, values in zip(layer.experts, norms, strict=True):
        expert.data = torch.tensor(values)[:, None].repeat(1, 4)
    return layer


def pairs(layer: DSSoftmax) -> list[tuple[int, int]]:
    rows = zip(layer.expert_of_row.tolist(), layer.class_of_row.tolist(), strict=True)
    return list(rows)


def test_rows_under_the_threshold_go() -> None:
    layer = layer_with_norms([[0.5, 0.1, 0.29], [0.2, 0.3, 0.31]])
    kept = rows_above(layer, 0.3)
    assert kept.tolist() == [True, False, False, False, True, True]


def test_keep_one_prefers_the_expert_with_most_contexts_then_the_larger_norm() -> None:
    layer = layer_with_norms([[0.02, 0.9, 0.01], [0.01, 0.0, 0.02]])
    kept = rows_above(layer, 0.3)
    contexts = torch.tensor([3.0, 0.0, 1.0, 5.0, 0.0, 1.0])
    # class 0: expert 1 has more contexts; class 1 survives anyway; class 2: a tie, larger norm
    kept = keep_one_copy(layer, kept, contexts)
    assert kept.tolist() == [False, True, False, True, False, True]


def test_keep_one_leaves_an_already_lost_class_lost() -> None:
    layer = layer_with_norms([[0.9, 0.0], [0.0, 0.0]])
    layer.keep_rows(torch.tensor([True, False, True, False]))
    kept = keep_one_copy(layer, rows_above(layer, 0.3), torch.zeros(2))
    assert kept.tolist() == [True, False]


@pytest.mark.parametrize("seed", range(5))
def test_every_class_that_had_a_copy_has_one_after(seed: int) -> None:
    torch.manual_seed(seed)
    layer = DSSoftmax(4, 30, 5)
    layer.keep_rows(torch.rand(150) < 0.3)
    before = set(layer.class_of_row.tolist())
    random = torch.rand(len(layer.keys)) < 0.2
    kept = keep_one_copy(layer, random, torch.rand(len(layer.keys)))
    assert (kept | ~random).all()
    layer.keep_rows(kept)
    assert set(layer.class_of_row.tolist()) == before
    # Only classes that would have been lost were spared a row, and one row each.
    assert kept.sum() == random.sum() + len(before - set_of(layer, random, kept))


def set_of(layer: DSSoftmax, random: torch.Tensor, kept: torch.Tensor) -> set[int]:
    """Classes of the rows that the mask alone would have kept."""
    return set(layer.class_of_row[random[kept]].tolist())


def test_pruning_keeps_the_optimizer_in_step() -> None:
    """A pruned model trains on exactly as one in which the other rows never were."""
    torch.manual_seed(0)
    layer = DSSoftmax(4, 6, 2)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    hidden, target = torch.randn(20, 4), torch.randint(6, (20,))
    for _ in range(3):
        optimizer.zero_grad()
        layer(hidden, target).loss.backward()
        optimizer.step()
    averages = torch.cat([optimizer.state[expert]["exp_avg"] for expert in layer.experts])
    before = layer.weight
    kept = torch.arange(12) % 3 != 0
    prune(layer, optimizer, kept)
    assert pairs(layer) == [(e, c) for e in range(2) for c in range(6) if (e * 6 + c) % 3]
    assert torch.equal(layer.weight, before[kept])
    left = torch.cat([optimizer.state[expert]["exp_avg"] for expert in layer.experts])
    assert torch.equal(left, averages[kept])
    optimizer.zero_grad()
    layer(hidden, target).loss.backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before[kept])
    assert len(optimizer.state) == 3


def stepped(layer: DSSoftmax, gradients: torch.Tensor) -> torch.optim.Adam:
    """An optimizer of rate 0 that has seen one gradient [V,D] of the only expert."""
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.0)
    layer.gate.grad, layer.experts[0].grad = torch.zeros_like(layer.gate), gradients
    optimizer.step()
    return optimizer


def test_shrink_lowers_a_norm_by_what_adam_would_make_of_the_lasso() -> None:
    """A lasso's gradient is 1 / D along the row; Adam divides by the gradients' size."""
    layer = layer_with_norms([[0.5, 0.5, 0.1, 0.0]])
    sizes = torch.tensor([[1.0], [0.5], [0.5], [1.0]])
    optimizer = stepped(layer, sizes.expand(4, 4).clone())
    shrink(layer, optimizer, 0.4)  # 0.4 / (4 * size): 0.1, 0.2, 0.2, 0.1
    assert layer.weight[:, 0].tolist() == pytest.approx([0.4, 0.3, 0.0, 0.0])
    assert torch.equal(layer.weight[2], torch.zeros(4))


def test_a_row_that_the_data_never_asks_for_goes_at_once() -> None:
    layer = layer_with_norms([[0.5, 0.5]])
    optimizer = stepped(layer, torch.tensor([[1.0] * 4, [0.0] * 4]))
    shrink(layer, optimizer, 0.001)
    assert layer.weight[0, 0] > 0.499
    assert torch.equal(layer.weight[1], torch.zeros(4))


def test_shrink_minimises_its_objective() -> None:
    """prox(w) = argmin_v |v - w|^2 / 2 + a |v|: no nearby v is better."""
    torch.manual_seed(1)
    layer = DSSoftmax(4, 3, 1)
    nn.init.normal_(layer.experts[0])
    before = layer.weight
    shrink(layer, stepped(layer, torch.ones(3, 4)), 0.4)
    after = layer.weight

    def objective(weight: torch.Tensor) -> float:
        # amounts are on the root mean square, so both terms are scaled to it
        distance = (weight - before).square().mean(1).sum() / 2
        return (distance + 0.1 * weight.square().mean(1).sqrt().sum()).item()

    for _ in range(50):
        assert objective(after) <= objective(after + 0.01 * torch.randn_like(after)) + 1e-7
