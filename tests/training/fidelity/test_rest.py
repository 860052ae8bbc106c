"""The estimate of what lies outside an expert."""

import torch

from trainer.layer.bias import logits
from trainer.layer.head_softmax import HeadSoftmax, keys_of
from trainer.training.fidelity.rest import fit_rest, own_logsumexp, unbiased

D, K, N = 4, 3, 12


def make_layer(held: torch.Tensor, seed: int) -> HeadSoftmax:
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(N, D, generator=generator)
    gate = torch.randn(K, D, generator=generator)
    return HeadSoftmax(head, gate, keys_of(held), torch.zeros(K, D + 1))


def error(layer: HeadSoftmax, hidden: torch.Tensor) -> float:
    true = logits(hidden, layer.head).logsumexp(dim=1)
    return float((layer.log_normaliser(hidden) - true).abs().mean())


def test_one_class_outside_is_estimated_by_its_own_row() -> None:
    held = torch.ones(K, N, dtype=torch.bool)
    held[torch.arange(K), torch.arange(K)] = False  # expert e lacks class e
    layer = make_layer(held, 0)
    hidden = torch.randn(20_000, D, generator=torch.Generator().manual_seed(1))
    before = error(layer, hidden[:2000])
    layer.rest = fit_rest(layer, hidden[2000:], logits(hidden[2000:], layer.head).logsumexp(dim=1))
    assert error(layer, hidden[:2000]) < min(0.03, 0.3 * before)


def test_the_estimated_normaliser_is_near_the_true_one() -> None:
    held = torch.rand(K, N, generator=torch.Generator().manual_seed(2)) < 0.5
    layer = make_layer(held, 3)
    hidden = torch.randn(20_000, D, generator=torch.Generator().manual_seed(4))
    unseen, hidden = hidden[:2000], hidden[2000:]
    normaliser = logits(hidden, layer.head).logsumexp(dim=1)
    layer.rest = fit_rest(layer, hidden, normaliser)
    constant = make_layer(held, 3)
    own = own_logsumexp(constant, hidden, constant.route(hidden).expert)
    constant.rest[:, -1] = (normaliser + torch.log1p(-(own - normaliser).exp())).mean()
    assert error(layer, unseen) < 0.7 * error(constant, unseen)
    bias = layer.log_normaliser(unseen) - logits(unseen, layer.head).logsumexp(dim=1)
    assert bias.mean().abs() < 0.05


def test_an_expert_that_no_row_reaches_gets_an_estimate_too() -> None:
    layer = make_layer(torch.ones(K, N, dtype=torch.bool).tril(), 5)
    layer.gate.data[2] = 0.0
    layer.gate.data[:2] = torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]])
    hidden = torch.randn(400, D, generator=torch.Generator().manual_seed(6))
    rest = fit_rest(layer, hidden, logits(hidden, layer.head).logsumexp(dim=1))
    assert rest.isfinite().all()


def test_a_few_large_coordinates_do_no_harm() -> None:
    """As language models have them: the estimate once fell to nothing there."""
    width, generator = 96, torch.Generator().manual_seed(7)
    common = torch.randn(12_000, 4, generator=generator) @ torch.randn(
        4, width, generator=generator
    )
    hidden = common + 0.3 * torch.randn(12_000, width, generator=generator)
    hidden[:, :2] *= 40
    head = torch.randn(400, width, generator=generator) / width**0.5
    head[:, :2] /= 40
    held = torch.rand(3, 400, generator=generator) < 0.9
    gate = torch.randn(3, width, generator=generator)
    layer = HeadSoftmax(head, gate, keys_of(held), torch.zeros(3, width + 1))
    layer.rest = fit_rest(layer, hidden[2000:], logits(hidden[2000:], head).logsumexp(dim=1))
    unseen, true = hidden[:2000], logits(hidden[:2000], head).logsumexp(dim=1)
    lacking = true - own_logsumexp(layer, unseen, layer.route(unseen).expert)
    assert error(layer, unseen) < 0.75 * float(lacking.mean())  # all of it without an estimate


def test_the_estimate_is_set_right_on_other_rows() -> None:
    held = torch.rand(K, N, generator=torch.Generator().manual_seed(2)) < 0.5
    layer = make_layer(held, 3)
    hidden = torch.randn(2000, D, generator=torch.Generator().manual_seed(4))
    true = logits(hidden, layer.head).logsumexp(dim=1)
    layer.rest[:, -1] = -1.0
    assert (layer.log_normaliser(hidden) - true).mean().abs() > 0.1
    layer.rest = unbiased(layer, hidden, true)
    assert (layer.log_normaliser(hidden) - true).mean().abs() < 1e-3
