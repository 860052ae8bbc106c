"""Fits the estimate of what lies outside an expert: the log of the sum of e^score over the classes
that it does not hold, as one linear row for each expert.

S query rows, B query rows of a batch, D hidden, K experts, V classes of one expert.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from service.terminal import progress
from trainer.data.arrays import chunks
from trainer.layer.bias import logits
from trainer.layer.head_softmax import HeadSoftmax, split_by_expert

SCORES_AT_ONCE = 2**22
SMALLEST_SHARE = 1e-6  # of the probability outside that is told from none
EPOCHS = 4
LEAST_STEPS = 600  # where there are few rows
BATCH = 1024
LEARNING_RATE = 0.02  # of standardised inputs; falls to nothing
LARGEST_SHIFT, SHIFT_STEPS = 3.0, 30  # of all estimates together
RIDGE = 0.001  # on an expert's deviation from the slope that all share


def fit_rest(layer: HeadSoftmax, hidden: Tensor, logsumexp: Tensor, seed: int = 0) -> Tensor:
    """Rows [K,D+1], last column the bias, from query rows [S,D] and the head's log Z [S].

    The loss is the squared error of the estimated log Z. Experts share a slope and have their own
    deviation from it, as far as their query rows tell one.
    """
    expert = layer.route(hidden).expert  # [S]
    own = own_logsumexp(layer, hidden, expert)  # [S]
    centre, spread = hidden.mean(dim=0), hidden.std(dim=0).clamp_min(1e-6)  # [D] each
    shared = torch.zeros(hidden.shape[1] + 1, requires_grad=True)
    deviation = first_guess(layer.n_experts, expert, own, logsumexp, hidden.shape[1])
    deviation.requires_grad_(True)
    optimizer = torch.optim.Adam([shared, deviation], lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    epochs = max(EPOCHS, math.ceil(LEAST_STEPS * BATCH / len(hidden)))
    orders = (torch.randperm(len(hidden), generator=generator) for _ in range(epochs))
    batches = [rows for order in orders for rows in order.split(BATCH)]
    for step, rows in enumerate(progress.each(batches, "what experts lack")):
        inputs = pad((hidden[rows] - centre) / spread, (0, 1), value=1.0)  # [B,D+1]
        slope = shared + deviation[expert[rows]]  # [B,D+1]
        estimate = torch.logaddexp(own[rows], (inputs * slope).sum(dim=1))
        loss = (estimate - logsumexp[rows]).square().mean()
        loss = loss + RIDGE * deviation[:, :-1].square().mean()
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / len(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    standard = (shared + deviation).detach()  # [K,D+1]
    slope = standard[:, :-1] / spread
    return torch.cat([slope, (standard[:, -1] - slope @ centre)[:, None]], dim=1)


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


def first_guess(
    n_experts: int, expert: Tensor, own: Tensor, logsumexp: Tensor, width: int
) -> Tensor:
    """[K,D+1]: no slope, and the log of the mean that rows of an expert lack."""
    lacking = -torch.expm1((own - logsumexp).clamp_max(0.0))  # [S] share outside
    outside = logsumexp + lacking.clamp_min(SMALLEST_SHARE).log()
    rows = torch.bincount(expert, minlength=n_experts).clamp_min(1)
    mean = torch.zeros(n_experts).index_add_(0, expert, outside) / rows
    mean[torch.bincount(expert, minlength=n_experts) == 0] = outside.mean()
    return torch.cat([torch.zeros(n_experts, width), mean[:, None]], dim=1)


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
