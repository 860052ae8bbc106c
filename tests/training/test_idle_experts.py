import torch

from trainer.layer import DSSoftmax
from trainer.training.config import TrainConfig
from trainer.training.idle_experts import idle_and_overloaded, rescue
from trainer.training.optimizer import make_optimizer


def test_extremes_are_paired_and_the_rest_left_alone() -> None:
    load = torch.tensor([100.0, 10.0, 250.0, 100.0, 140.0, 0.0])  # mean 100
    assert idle_and_overloaded(load) == [(5, 2), (1, 4)]
    assert idle_and_overloaded(torch.tensor([100.0, 60.0, 120.0, 120.0])) == []
    assert idle_and_overloaded(torch.full((4,), 7.0)) == []


def test_the_idle_expert_becomes_a_clone_and_traffic_divides() -> None:
    """Expert 0 serves both clusters and expert 1 none; after rescue each gets one cluster."""
    torch.manual_seed(0)
    layer = DSSoftmax(2, 4, 2)
    layer.gate.data = torch.tensor([[20.0, 20.0], [-20.0, -20.0]])
    centres = torch.tensor([[1.0, 0.2], [0.2, 1.0]])
    target = torch.randint(4, (400,))
    hidden = centres[target // 2] + 0.05 * torch.randn(400, 2)
    optimizer = make_optimizer(TrainConfig(learning_rate=0.02), layer)

    def step(balance: float) -> None:
        routing = layer.route(hidden)
        loads = torch.zeros(2).index_add(0, routing.expert, routing.gate)
        loss = layer(hidden, target, routing).loss + balance * loads.var() / loads.mean() ** 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(50):
        step(balance=1.0)
    stuck = torch.bincount(layer.route(hidden).expert, minlength=2)
    assert stuck.tolist() == [400, 0]

    routed = layer.route(hidden).expert
    assert rescue(layer, optimizer, stuck.float(), hidden, routed) == 1
    assert torch.equal(layer.experts[0], layer.experts[1])
    for _ in range(300):
        step(balance=1.0)
    expert = layer.route(hidden).expert
    assert {tuple(set(expert[target // 2 == c].tolist())) for c in (0, 1)} == {(0,), (1,)}
