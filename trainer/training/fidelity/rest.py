"""Fits the estimate of what lies outside an expert: the log of the sum of e^score over the classes
that it does not hold, as one linear row for each expert.

S query rows, B query rows of a batch, D hidden, K experts, V classes of one expert.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer.data.arrays import chunks
from trainer.layer.bias import logits, with_one
from trainer.layer.head_softmax import HeadSoftmax, split_by_expert

SCORES_AT_ONCE = 2**22
SMALLEST_SHARE = 1e-6  # of the probability outside that is told from none
STEPS, NEXT = 2, 2.0  # of the fit, and how far a target may be from the estimate before
SHARED_ROWS, OWN_ROWS = 10.0, 100.0  # of the ridges on the slope, and on an expert's deviation
LARGEST_SHIFT, SHIFT_STEPS = 5.0, 30  # of all estimates together


@torch.no_grad()
def fit_rest(layer: HeadSoftmax, hidden: Tensor, logsumexp: Tensor) -> Tensor:
    """Rows [K,D+1], last column the bias, from query rows [S,D] and the head's log Z [S].

    Least squares of the log of what lies outside, each row weighted by the square of its share of
    Z: so the error counts that log Z has by it, and a second step sees that error itself. Experts
    share a slope, and each has its own deviation from it as far as its query rows tell one.
    """
    expert = layer.route(hidden).expert  # [S]
    own = own_logsumexp(layer, hidden, expert)  # [S]
    lacking = -torch.expm1((own - logsumexp).clamp_max(0.0))  # [S] share outside
    target = logsumexp + lacking.clamp_min(SMALLEST_SHARE).log()  # [S]
    of_expert = [(expert == number).nonzero()[:, 0] for number in range(layer.n_experts)]
    centre, spread = hidden.mean(dim=0), hidden.std(dim=0).clamp_min(1e-6)  # [D] each
    for _ in range(STEPS):
        weight = lacking.square().clamp_min(SMALLEST_SHARE)
        standard = least_squares(hidden, target, weight, of_expert, centre, spread)  # [K,D+1]
        slope = standard[:, :-1] / spread
        found = torch.cat([slope, (standard[:, -1] - slope @ centre)[:, None]], dim=1)
        outside = torch.empty_like(own)
        for rows, row in zip(of_expert, found, strict=True):
            outside[rows] = with_one(hidden[rows]) @ row
        # What would mend log Z next, by its slope at the estimate.
        lacking = torch.sigmoid(outside - own)
        missed = logsumexp - torch.logaddexp(own, outside)
        target = outside + (missed / lacking.clamp_min(SMALLEST_SHARE)).clamp(-NEXT, NEXT)
    return found


def least_squares(
    hidden: Tensor,
    target: Tensor,
    weight: Tensor,
    of_expert: list[Tensor],
    centre: Tensor,
    spread: Tensor,
) -> Tensor:
    """Rows [K,D+1] of standardised inputs for targets [S], of which each has a weight [S]."""
    weight = weight / weight.mean()
    level = (weight * target).mean()
    grams, sides = [], []
    for rows in of_expert:
        inputs = pad((hidden[rows] - centre) / spread, (0, 1), value=1.0)  # [b,D+1]
        weighted = inputs * weight[rows, None]
        grams.append((inputs.T @ weighted).double())  # [D+1,D+1]
        sides.append((weighted.T @ (target[rows] - level)).double())  # [D+1]
    slope = solved(torch.stack(grams).sum(dim=0), torch.stack(sides).sum(dim=0), SHARED_ROWS)
    own = [
        solved(gram, side - gram @ slope, OWN_ROWS) for gram, side in zip(grams, sides, strict=True)
    ]
    standard = (slope + torch.stack(own)).float()
    standard[:, -1] += level
    return standard


def solved(gram: Tensor, side: Tensor, ridge: float) -> Tensor:
    """The least squares [D+1] of a gram matrix, as if so many rows besides had said nothing."""
    return torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=gram.dtype), side)


@torch.no_grad()
def unbiased(layer: HeadSoftmax, hidden: Tensor, logsumexp: Tensor) -> Tensor:
    """The layer's rows [K,D+1] with one number added to all biases, so that log Z is right on
    average over query rows [T,D] with the head's log Z [T].

    The layer has not learned from these: rows that it did learn from have less outside its experts.
    """
    expert = layer.route(hidden).expert  # [T]
    own = own_logsumexp(layer, hidden, expert)
    outside = torch.empty_like(own)
    for number in range(layer.n_experts):
        rows = (expert == number).nonzero()[:, 0]
        outside[rows] = layer.outside(number, hidden[rows])
    low, high = -LARGEST_SHIFT, LARGEST_SHIFT
    for _ in range(SHIFT_STEPS):
        middle = (low + high) / 2
        over = torch.logaddexp(own, outside + middle).mean() > logsumexp.mean()
        low, high = (low, middle) if over else (middle, high)
    shifted = layer.rest.clone()
    shifted[:, -1] += (low + high) / 2
    return shifted


@torch.no_grad()
def own_logsumexp(layer: HeadSoftmax, hidden: Tensor, expert: Tensor) -> Tensor:
    """The log of the sum of e^score over the classes of each row's expert, [S]."""
    found = hidden.new_empty(len(hidden))
    for number, classes in enumerate(split_by_expert(layer)):
        rows = (expert == number).nonzero()[:, 0]
        held = layer.head[classes]  # [V,D]
        for part in chunks(len(rows), max(1, SCORES_AT_ONCE // max(len(classes), 1))):
            found[rows[part]] = logits(hidden[rows[part]], held).logsumexp(dim=1)
    return found
