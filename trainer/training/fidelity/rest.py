"""Fits the estimate of what lies outside an expert: the log of the sum of e^score over the classes
that it does not hold, as one linear row for each expert.

S query rows, b query rows of one expert, D hidden, K experts, V classes of one expert.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from service.terminal import progress
from trainer.data.arrays import chunks
from trainer.layer.bias import logits
from trainer.layer.head_softmax import HeadSoftmax, split_by_expert

SCORES_AT_ONCE = 2**22
SMALLEST_SHARE = 1e-6  # of the probability outside that is told from none
RIDGE = 1e-3  # of the slope that all experts share, relative to the rows' weight
OWN_ROWS = 1.0  # times D: so many rows of an expert weigh as much as what all experts share


@torch.no_grad()
def fit_rest(layer: HeadSoftmax, hidden: Tensor, logsumexp: Tensor) -> Tensor:
    """Rows [K,D+1], last column the bias, from query rows [S,D] and the head's log Z [S].

    Rows count by the share of probability outside their expert: the normaliser errs by that share
    of the estimate's error. Experts share a slope and have their own deviation from it, as far as
    their query rows tell one.
    """
    expert = layer.route(hidden).expert  # [S]
    outside = log_outside(layer, hidden, logsumexp, expert)  # [S]
    weight = (outside - logsumexp).exp().clamp_min(SMALLEST_SHARE)  # [S]
    centre, spread = hidden.mean(dim=0), hidden.std(dim=0).clamp_min(1e-6)  # [D] each
    groups = [(expert == number).nonzero()[:, 0] for number in range(layer.n_experts)]
    everywhere = (weight * outside).sum() / weight.sum()

    def standard(rows: Tensor) -> Tensor:
        return (hidden[rows] - centre) / spread

    shared = _shared_slope(groups, standard, outside, weight)  # [D]
    rest = torch.empty(layer.n_experts, hidden.shape[1] + 1)
    for number, rows in enumerate(progress.each(groups, "the rest of each expert")):
        slope, bias = shared, everywhere
        if len(rows):
            own, bias = _fit(standard(rows), outside[rows], weight[rows], shared)
            slope = shared + own
        rest[number, :-1] = slope / spread
        rest[number, -1] = bias - (slope / spread) @ centre
    return rest


def log_outside(layer: HeadSoftmax, hidden: Tensor, logsumexp: Tensor, expert: Tensor) -> Tensor:
    """The log of the sum of e^score over the classes outside each row's expert, [S]."""
    found = torch.empty_like(logsumexp)
    for number, classes in enumerate(split_by_expert(layer)):
        rows = (expert == number).nonzero()[:, 0]
        held = layer.head[classes]  # [V,D]
        for part in chunks(len(rows), max(1, SCORES_AT_ONCE // max(len(classes), 1))):
            own = logits(hidden[rows[part]], held).logsumexp(dim=1)  # [b]
            share = -torch.expm1((own - logsumexp[rows[part]]).clamp_max(0.0))
            found[rows[part]] = logsumexp[rows[part]] + share.clamp_min(SMALLEST_SHARE).log()
    return found


def _shared_slope(
    groups: list[Tensor], standard: Callable[[Tensor], Tensor], outside: Tensor, weight: Tensor
) -> Tensor:
    """The slope [D] of all experts, each with its own bias."""
    products = moments = None
    total = weight.sum()
    for rows in groups:
        if not len(rows):
            continue
        x, y, w = _centred(standard(rows), outside[rows], weight[rows])
        xx, xy = x.T @ (w[:, None] * x), x.T @ (w * y)
        products, moments = (xx, xy) if products is None else (products + xx, moments + xy)
    assert products is not None and moments is not None  # noqa: S101  there are query rows
    ridge = RIDGE * total * torch.eye(len(products))
    return torch.linalg.solve(products + ridge, moments)


def _fit(x: Tensor, y: Tensor, weight: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    """An expert's own deviation from the shared slope [D], and its bias."""
    centred, residual, w = _centred(x, y - x @ shared, weight)
    ridge = OWN_ROWS * x.shape[1] * weight.mean() * torch.eye(x.shape[1])
    products = centred.T @ (w[:, None] * centred)
    own = torch.linalg.solve(products + ridge, centred.T @ (w * residual))
    bias = (weight * (y - x @ (shared + own))).sum() / weight.sum()
    return own, bias


def _centred(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    share = weight / weight.sum()
    return x - share @ x, y - share @ y, weight
