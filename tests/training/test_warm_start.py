"""The warm start: clusters, what they ask for, and the choice under a budget."""

import pytest
import torch
from torch import Tensor

from trainer.training import warm_start
from trainer.training.answer_gains import answer_gains, head_gains
from trainer.training.problem import BudgetImpossible
from trainer.training.warm_start import Demand

# Two experts of 30 and 10 rows (u = 3/4, 1/4), four classes.
DEMAND = Demand(
    gain=torch.tensor([[30.0, 15.0, 3.0, 0.0], [10.0, 0.0, 9.0, 0.0]]),
    labels=torch.tensor([[20.0, 9.0, 1.0, 0.0], [4.0, 0.0, 6.0, 0.0]]),
    rows=torch.tensor([30.0, 10.0]),
)


def pairs(held: Tensor) -> set[tuple[int, int]]:
    return {(int(e), int(c)) for e, c in held.nonzero()}


def test_without_a_tight_budget_everything_wanted_is_held() -> None:
    held = warm_start.select(DEMAND, 100, keep_one=False)
    assert pairs(held) == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 2)}
    assert warm_start.mean_cost(held, DEMAND) == pytest.approx(3 * 0.75 + 2 * 0.25)


def test_the_most_wanted_pairs_are_kept_within_the_budget() -> None:
    """Shares: (0,0) 1, (1,0) 1, (1,2) 0.9, (0,1) 0.5, (0,2) 0.1."""
    held = warm_start.select(DEMAND, 2.0, keep_one=False)
    assert pairs(held) == {(0, 0), (1, 0), (1, 2), (0, 1)}
    assert warm_start.mean_cost(held, DEMAND) == 2.0
    held = warm_start.select(DEMAND, 1.99, keep_one=False)
    assert pairs(held) == {(0, 0), (1, 0), (1, 2)}


def test_keep_one_gives_the_others_a_place_where_it_pays() -> None:
    held = warm_start.select(DEMAND, 100, keep_one=True)
    # Class 3 is never wanted and goes to the expert whose rows are fewest: it costs least there.
    assert (1, 3) in pairs(held)
    # Class 1 is held by nobody below: of 9 labels in 30 rows or none in 10 the former is better.
    assert warm_start.fallback_experts(DEMAND, 100)[1] == 0
    assert held.any(dim=0).all()
    tight = warm_start.select(DEMAND, 2.25, keep_one=True)
    assert tight.any(dim=0).all() and warm_start.mean_cost(tight, DEMAND) <= 2.25


def test_an_expert_without_traffic_is_no_place_for_copies() -> None:
    """Class 1 is a label of 5 of 100 rows in one expert, and never in one that gets one row."""
    wanted = Demand(
        gain=torch.tensor([[100.0, 0.0], [1.0, 0.0]]),
        rows=torch.tensor([100.0, 1.0]),
        labels=torch.tensor([[95.0, 5.0], [1.0, 0.0]]),
    )
    assert warm_start.fallback_experts(wanted, 100).tolist() == [0, 0]
    held = torch.tensor([[True, False], [True, False]])
    assert pairs(warm_start.with_one_copy(held, torch.tensor([0, 0]))) == {(0, 0), (1, 0), (0, 1)}


def test_copies_go_to_quieter_experts_where_they_cost_too_much() -> None:
    """Twenty classes that are mostly seen in the busy one of two experts."""
    labels = torch.tensor([[40.0] * 20, [5.0] * 20])
    wanted = Demand(gain=labels, rows=labels.sum(dim=1), labels=labels)
    assert warm_start.fallback_experts(wanted, affordable=100).sum() == 0  # 20 * 8/9 rows
    assert warm_start.fallback_experts(wanted, affordable=10).sum() == 20  # 20 * 1/9


@pytest.mark.parametrize(("budget", "keep_one"), [(0.5, True), (-3.0, True), (0.1, False)])
def test_an_impossible_budget_is_named(budget: float, keep_one: bool) -> None:
    with pytest.raises(BudgetImpossible, match="the least is"):
        warm_start.select(DEMAND, budget, keep_one=keep_one)


def clustered(n_rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Four directions; rows near them, and which."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(4, (n_rows,), generator=generator)
    rows = 3 * torch.eye(4, 8)[which] + 0.2 * torch.randn(n_rows, 8, generator=generator)
    return rows, which


def test_the_gate_finds_clusters_and_is_sure_but_not_hard() -> None:
    hidden, which = clustered(800)
    gate = warm_start.cluster_gate(hidden, 4, seed=0)
    expert = (hidden @ gate.T).argmax(dim=1)
    assert len({(int(a), int(b)) for a, b in zip(which, expert, strict=True)}) == 4
    values = torch.softmax(hidden @ gate.T, dim=1).max(dim=1).values
    assert values.mean().item() == pytest.approx(warm_start.GATE_VALUE, abs=0.01)


def test_demand_counts_the_full_softmaxs_answers() -> None:
    hidden, which = clustered(100)
    head = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(100) % 30
    gate = torch.eye(4, 8)
    found = warm_start.demand(gate, hidden, head_gains(head, hidden), hidden, labels)
    assert found.rows.tolist() == torch.bincount(which, minlength=4).tolist()
    few = head_gains(head, hidden[:50])
    sampled = warm_start.demand(gate, hidden[:50], few, hidden, labels)
    assert sampled.rows.tolist() == torch.bincount(which[:50], minlength=4).tolist()
    assert torch.equal(sampled.labels, found.labels)  # of all rows, however few are sampled
    best, value = answer_gains(hidden @ head.T)
    for expert in range(4):
        mine = which == expert
        expected = torch.bincount(best[mine].flatten(), value[mine].flatten(), minlength=30)
        torch.testing.assert_close(found.gain[expert], expected)
        assert torch.equal(found.labels[expert].long(), torch.bincount(labels[mine], minlength=30))


def test_what_an_answer_is_worth() -> None:
    """Probabilities 1/2, 1/4, ...: without the first class 1/2 is lost and 1/4 moves up, ..."""
    probability = 2.0 ** -torch.arange(1.0, 13.0)
    probability[-1] *= 2  # so that they sum to one
    order = torch.tensor([3, 0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11])
    logits = torch.empty(1, 12)
    logits[0, order] = probability.log()
    best, value = answer_gains(logits)
    assert best[0].tolist() == order[:10].tolist()
    p = probability.tolist()
    assert value[0, 0].item() == pytest.approx(3 * p[0] - p[1] - p[5] - p[10])
    assert value[0, 4].item() == pytest.approx(2 * p[4] - p[5] - p[10])
    assert value[0, 9].item() == pytest.approx(p[9] - p[10])


def test_fewer_classes_than_answers() -> None:
    best, value = answer_gains(torch.tensor([[0.0, 1.0, 2.0]]))
    assert best.tolist() == [[2, 1, 0]]
    p = torch.softmax(torch.tensor([2.0, 1.0, 0.0]), dim=0).tolist()
    assert value[0].tolist() == pytest.approx([3 * p[0] - p[1], 2 * p[1], 2 * p[2]])


def test_a_layer_takes_known_rows_over_and_new_ones_from_the_head() -> None:
    head = torch.randn(5, 3)
    gate = torch.randn(2, 3)
    first = warm_start.make_layer(
        gate, torch.tensor([[1, 1, 0, 0, 0], [0, 0, 1, 1, 0]]) > 0, head, None
    )
    torch.testing.assert_close(first.experts[1][0], head[2] / warm_start.GATE_VALUE)
    first.experts[1].data[0] = 7.0
    second = warm_start.make_layer(
        gate, torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 0, 1]]) > 0, head, first
    )
    assert second.class_of_row.tolist() == [1, 2, 2, 4]
    assert torch.equal(second.experts[1][0], torch.full((3,), 7.0))
    torch.testing.assert_close(second.experts[0][1], head[2] / warm_start.GATE_VALUE)
