"""The layer against a dense reference, a hand-worked case and finite differences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trainer.layer import DSSoftmax, Routing, Teacher


def random_layer(
    seed: int, hidden: int = 6, classes: int = 9, experts: int = 4, density: float = 0.5
) -> DSSoftmax:
    torch.manual_seed(seed)
    layer = DSSoftmax(hidden, classes, experts)
    layer.keep_rows(torch.rand(experts * classes) < density)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def dense_log_prob(layer: DSSoftmax, hidden: Tensor) -> Tensor:
    """Equations 1 and 2 of the paper, literally: all K experts, all N classes, zeros elsewhere."""
    weight = torch.zeros(layer.n_experts, layer.n_classes, layer.in_features, dtype=hidden.dtype)
    weight[layer.expert_of_row, layer.class_of_row] = layer.weight
    softmax = torch.softmax(hidden @ layer.gate.T, dim=1)  # [B,K]
    largest = softmax == softmax.max(dim=1, keepdim=True).values
    gates = torch.where(largest, softmax, torch.zeros(()))  # [B,K]
    logits = torch.einsum("bk,kcd,bd->bc", gates, weight, hidden)
    return torch.log_softmax(logits, dim=1)


masks = st.tuples(st.integers(0, 10_000), st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))


@given(masks)
@settings(max_examples=60, deadline=None)
def test_compact_equals_dense_with_pruned_logits_zero(case: tuple[int, float]) -> None:
    seed, density = case
    layer = random_layer(seed, density=density)
    hidden = torch.randn(20, 6)
    torch.testing.assert_close(
        layer.log_prob(hidden), dense_log_prob(layer, hidden), atol=1e-5, rtol=1e-5
    )


@given(masks)
@settings(max_examples=30, deadline=None)
def test_probabilities_sum_to_one(case: tuple[int, float]) -> None:
    seed, density = case
    layer = random_layer(seed, density=density)
    sums = layer.log_prob(torch.randn(20, 6)).exp().sum(dim=1)
    torch.testing.assert_close(sums, torch.ones(20), atol=1e-5, rtol=0)


@given(masks)
@settings(max_examples=30, deadline=None)
def test_forward_is_the_targets_log_probability(case: tuple[int, float]) -> None:
    seed, density = case
    layer = random_layer(seed, density=density)
    hidden, target = torch.randn(20, 6), torch.randint(9, (20,))
    output, loss = layer(hidden, target)
    expected = layer.log_prob(hidden)[torch.arange(20), target]
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(loss, -expected.mean(), atol=1e-5, rtol=1e-5)


def test_hand_worked_two_experts() -> None:
    """Two experts, three classes, one hidden unit; all by hand."""
    layer = DSSoftmax(1, 3, 2)
    layer.gate.data = torch.tensor([[math.log(3.0)], [0.0]])  # h = 1: gates 3/4 and 1/4
    layer.keep_rows(torch.tensor([True, False, True, False, True, False]))
    layer.experts[0].data = torch.tensor([[4 / 3 * math.log(2.0)], [4 / 3 * math.log(5.0)]])
    layer.experts[1].data = torch.tensor([[7.0]])
    hidden = torch.tensor([[1.0]])

    expert, gate = layer.route(hidden)
    assert expert.item() == 0
    assert gate.item() == pytest.approx(3 / 4)
    # Expert 0 holds classes 0 and 2 with e^score 2 and 5; class 1 is pruned and has e^0 = 1.
    expected = [2 / 8, 1 / 8, 5 / 8]
    assert layer.log_prob(hidden).exp()[0].tolist() == pytest.approx(expected)
    assert layer.predict(hidden).item() == 2
    assert layer.topk(hidden, 2).classes.tolist() == [[2, 0]]
    # k = 3 needs class 1 from expert 1: score 3/4 * 7, trusted (1/4) / (3/4) as much.
    top = layer.topk(hidden, 3)
    probability = math.exp(21 / 4) / (math.exp(21 / 4) + 2) / 3
    assert sorted(top.classes[0].tolist()) == [0, 1, 2]
    assert top.log_probs[0].exp().tolist() == pytest.approx([5 / 8, probability, 2 / 8])


def test_gradient_of_gate_and_weight_equals_finite_differences() -> None:
    layer = random_layer(3, density=0.7).double()
    hidden = torch.randn(12, 6, dtype=torch.float64)
    target = torch.randint(9, (12,))
    assert torch.autograd.gradcheck(
        lambda gate, expert: torch.func.functional_call(
            layer, {"gate": gate, "experts.1": expert}, (hidden, target)
        )[1],
        (layer.gate, layer.experts[1]),
    )


def test_gradient_reaches_every_row_of_the_gate() -> None:
    layer = random_layer(4)
    hidden = torch.randn(1, 6)
    layer(hidden, torch.tensor([0]))[1].backward()
    assert (layer.gate.grad.abs().sum(dim=1) > 0).all()


def test_rows_do_not_depend_on_their_batch() -> None:
    layer = random_layer(5)
    hidden, target = torch.randn(30, 6), torch.randint(9, (30,))
    together = layer(hidden, target).output
    alone = torch.cat([layer(hidden[i : i + 1], target[i : i + 1]).output for i in range(30)])
    torch.testing.assert_close(together, alone)


def test_topk_agrees_with_log_prob_where_the_expert_has_k_classes() -> None:
    layer = random_layer(6, density=1.0)
    hidden = torch.randn(20, 6)
    log_probs, classes = layer.log_prob(hidden).sort(dim=1, descending=True)
    top = layer.topk(hidden, 4)
    assert torch.equal(top.classes, classes[:, :4])
    torch.testing.assert_close(top.log_probs, log_probs[:, :4])


def test_searching_more_experts_never_lowers_a_score() -> None:
    layer = random_layer(7)
    hidden = torch.randn(50, 6)
    for experts in range(1, 4):
        fewer = layer.topk(hidden, 3, experts=experts).log_probs
        more = layer.topk(hidden, 3, experts=experts + 1).log_probs
        assert (more >= fewer - 1e-6).all()


@given(masks)
@settings(max_examples=30, deadline=None)
def test_distillation_is_cross_entropy_against_the_mixed_distribution(
    case: tuple[int, float],
) -> None:
    seed, density = case
    layer = random_layer(seed, density=density)
    hidden, target, head = torch.randn(20, 6), torch.arange(20) % 9, torch.randn(9, 6)
    logits = hidden @ head.T
    labels = torch.nn.functional.one_hot(target, 9)
    for weight in (0.0, 0.3, 1.0):
        wanted = weight * torch.softmax(logits, dim=1) + (1 - weight) * labels
        expected = -(wanted * layer.log_prob(hidden)).sum(dim=1)
        teacher = Teacher(head, logits.logsumexp(dim=1), weight)
        found = layer.distillation_loss(hidden, target, teacher)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_given_routing_is_used() -> None:
    layer = random_layer(8, density=1.0)
    hidden, target = torch.randn(5, 6), torch.randint(9, (5,))
    routing = Routing(torch.full((5,), 2), torch.full((5,), 0.5))
    scores = 0.5 * hidden @ layer.experts[2].T
    expected = torch.log_softmax(scores, dim=1)[torch.arange(5), target]
    torch.testing.assert_close(layer(hidden, target, routing).output, expected)


def test_noise_only_while_training() -> None:
    layer = random_layer(9)
    layer.gate_noise = 100.0
    hidden = torch.randn(200, 6)
    layer.eval()
    quiet = layer.route(hidden).expert
    assert torch.equal(quiet, layer.route(hidden).expert)
    layer.train()
    assert not torch.equal(quiet, layer.route(hidden).expert)


def test_state_dict_of_a_pruned_layer_loads_into_a_new_one() -> None:
    layer = random_layer(10, density=0.3)
    new = DSSoftmax(6, 9, 4)
    new.load_state_dict(layer.state_dict())
    hidden = torch.randn(5, 6)
    assert torch.equal(new.log_prob(hidden), layer.log_prob(hidden))


def test_targets_k_and_experts_out_of_range_are_refused() -> None:
    layer = random_layer(11)
    hidden = torch.randn(2, 6)
    for target in (torch.tensor([0, 9]), torch.tensor([-1, 0])):
        with pytest.raises(ValueError, match="target"):
            layer(hidden, target)
    reachable = len(set(layer.class_of_row.tolist()))
    for k in (0, reachable + 1):
        with pytest.raises(ValueError, match="k must"):
            layer.topk(hidden, k)
    for experts in (0, 5):
        with pytest.raises(ValueError, match="experts must"):
            layer.topk(hidden, 1, experts)


def test_it_trains_inside_any_module() -> None:
    torch.manual_seed(0)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 8)
            self.head = DSSoftmax(8, 6, 2)

        def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
            return self.head(torch.relu(self.body(inputs)), target).loss

    model = Classifier()
    target = torch.arange(6).repeat(20)
    inputs = torch.randn(6, 4)[target] * 3 + 0.1 * torch.randn(120, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    first = model(inputs, target).item()
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(inputs, target)
        loss.backward()
        optimizer.step()
    assert loss.item() < first / 4
