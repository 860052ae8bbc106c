"""The estimate of what lies outside an expert."""

import torch

from trainer.layer.bias import logits
from trainer.layer.head_softmax import HeadSoftmax, keys_of
from trainer.training.fidelity.rest import fit_rest, log_outside

D, K, N = 4, 3, 12


def make_layer(held: torch.Tensor, seed: int) -> HeadSoftmax:
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(N, D, generator=generator)
    gate = torch.randn(K, D, generator=generator)
    return HeadSoftmax(head, gate, keys_of(held), torch.zeros(K, D + 1))


def test_one_class_outside_is_estimated_by_its_own_row() -> None:
    held = torch.ones(K, N, dtype=torch.bool)
    held[torch.arange(K), torch.arange(K)] = False  # expert e lacks class e
    layer = make_layer(held, 0)
    hidden = torch.randn(6000, D, generator=torch.Generator().manual_seed(1))
    rest = fit_rest(layer, hidden, logits(hidden, layer.head).logsumexp(dim=1))
    # What lies outside is known down to a millionth of the whole, so not quite the row itself.
    torch.testing.assert_close(rest[:, :-1], layer.head[:K], atol=0.1, rtol=0.1)
    assert rest[:, -1].abs().max() < 0.1


def test_the_estimated_normaliser_is_near_the_true_one() -> None:
    held = torch.rand(K, N, generator=torch.Generator().manual_seed(2)) < 0.5
    layer = make_layer(held, 3)
    generator = torch.Generator().manual_seed(4)
    hidden, unseen = (torch.randn(n, D, generator=generator) for n in (6000, 500))
    layer.rest = fit_rest(layer, hidden, logits(hidden, layer.head).logsumexp(dim=1))
    true = logits(unseen, layer.head).logsumexp(dim=1)
    error = (layer.log_normaliser(unseen) - true).abs().mean()
    constant = make_layer(held, 3)
    outside = log_outside(constant, hidden, logits(hidden, layer.head).logsumexp(dim=1),
                          constant.route(hidden).expert).mean()  # fmt: skip
    constant.rest[:, -1] = outside
    assert error < 0.6 * (constant.log_normaliser(unseen) - true).abs().mean()


def test_an_expert_that_no_row_reaches_gets_the_shared_estimate() -> None:
    layer = make_layer(torch.ones(K, N, dtype=torch.bool).tril(), 5)
    layer.gate.data[2] = 0.0
    layer.gate.data[:2] = torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]])
    hidden = torch.randn(400, D, generator=torch.Generator().manual_seed(6))
    rest = fit_rest(layer, hidden, logits(hidden, layer.head).logsumexp(dim=1))
    assert rest.isfinite().all()
