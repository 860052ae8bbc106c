"""Doubling: the same answers from twice the experts, and only what is inherited in memory."""

import pytest
import torch
from torch import Tensor

from trainer.layer import DSSoftmax
from trainer.training import mitosis

N, D = 12, 6


@pytest.fixture
def head() -> Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(400, D, generator=torch.Generator().manual_seed(1))


def doubled(layer: DSSoftmax, hidden: Tensor, noise: float = 0.0) -> DSSoftmax:
    """All rows inherited."""
    gate = mitosis.split_gate(layer, hidden)
    everything = torch.ones(2 * len(layer.keys), dtype=torch.bool)
    return mitosis.split(layer, gate, everything, hidden, noise)


def test_one_expert_is_the_full_softmax(head: Tensor, hidden: Tensor) -> None:
    layer = mitosis.one_expert(head)
    expected = (hidden @ head.T).log_softmax(dim=1)
    torch.testing.assert_close(layer.log_prob(hidden), expected)


def test_clones_share_the_traffic_and_answer_as_before(head: Tensor, hidden: Tensor) -> None:
    before = mitosis.one_expert(head)
    after = doubled(before, hidden)
    expert, _ = after.route(hidden)
    shares = torch.bincount(expert, minlength=2) / len(hidden)
    assert shares.min() > 0.3
    assert torch.equal(after.predict(hidden), before.predict(hidden))
    # The gate is lower than its parent's was, by a factor that is made up for on average.
    weight = torch.stack([rows.detach() for rows in after.experts])  # [2,N,D]
    scores = torch.einsum("bnd,bd->bn", weight[expert], hidden)
    gated = after.route(hidden).gate.detach()[:, None] * scores
    assert (gated / (hidden @ head.T)).mean().item() == pytest.approx(1, abs=0.02)


def test_noise_makes_clones_differ(head: Tensor, hidden: Tensor) -> None:
    same = doubled(mitosis.one_expert(head), hidden)
    assert torch.equal(same.experts[0], same.experts[1])
    noisy = doubled(mitosis.one_expert(head), hidden, noise=0.1)
    difference = (noisy.experts[0] - same.experts[0]) / same.experts[0].square().mean(1).sqrt()[
        :, None
    ]
    assert difference.std().item() == pytest.approx(0.1, rel=0.3)


def test_a_class_goes_only_to_a_clone_that_its_rows_reach(head: Tensor, hidden: Tensor) -> None:
    layer = mitosis.one_expert(head)
    gate = mitosis.split_gate(layer, hidden)
    clone = (hidden @ gate.T).argmax(dim=1)
    # Class 0 is seen by both clones, classes 1 and 2 by one each, the others by none.
    first, second = (clone == 0).nonzero()[:, 0], (clone == 1).nonzero()[:, 0]
    rows = torch.cat([first[:2], second[:2]])
    labels = torch.tensor([0, 1, 0, 2])
    kept = mitosis.inherited(layer, gate, hidden[rows], labels, keep_one=False)
    assert kept.nonzero()[:, 0].tolist() == [0, 1, N, N + 2]
    spared = mitosis.inherited(layer, gate, hidden[rows], labels, keep_one=True)
    copies = spared.view(2, N).sum(dim=0)
    assert copies.tolist() == [2] + [1] * (N - 1)
    split = mitosis.split(layer, gate, kept, hidden, noise=0.0)
    assert split.expert_sizes == [2, 2] and len(split.weight) == 4
    assert split.class_of_row.tolist() == [0, 1, 0, 2]
    torch.testing.assert_close(
        split.experts[1][1] / split.experts[1][1].norm(), head[2] / head[2].norm()
    )


def test_an_idle_expert_is_doubled_as_well(head: Tensor, hidden: Tensor) -> None:
    layer = doubled(mitosis.one_expert(head), hidden)
    layer.gate.data[1] = -100 * hidden.mean(dim=0)  # nearly no row goes there
    layer.gate.data[0] = 100 * hidden.mean(dim=0)
    busy = hidden[(hidden @ layer.gate.T).argmax(dim=1) == 0]
    again = doubled(layer, busy)
    assert again.expert_sizes == [N] * 4
    assert again.gate.isfinite().all() and again.weight.isfinite().all()


def test_stages_and_their_budgets() -> None:
    assert mitosis.stages(64) == [2, 4, 8, 16, 32, 64]
    assert mitosis.stages(2) == [2]
    assert mitosis.stages(48) == [2, 4, 8, 16, 32]
    assert mitosis.stage_budget(10_000, 8, 1.5, 400) == 1875
    assert mitosis.stage_budget(10_000, 64, 1.5, 400) == 400
