"""Which classes each expert holds: those that the head answers to the expert's query rows.

S query rows, D hidden, K experts, N classes, T answers of the head.
"""

import torch
from torch import Tensor

from trainer.data.arrays import chunks
from trainer.training.fidelity.teacher import Answers
from trainer.training.metrics import ROWS_AT_ONCE
from trainer.training.warm_start import COPIES, Demand

MEASURED = 10  # first answers, which count alike ...
FIRST = 0.1  # ... but for what the first one counts besides
STEPS = 30  # of the search for a price


def values(answers: Answers, fading: float) -> Tensor:
    """What it is worth to hold each of the head's answers, [S,T].

    Answers behind the first MEASURED are worth e times less for each `fading` logits: they are
    among the first of rows alike. With a fading of 0 they are worth nothing.
    """
    scores = answers.scores
    last = min(MEASURED, scores.shape[1])
    worth = torch.full_like(scores, (1 - FIRST) / last)
    behind = scores[:, last:] - scores[:, last - 1 : last]
    worth[:, last:] *= (behind / fading).exp() if fading else 0.0
    worth[:, 0] += FIRST
    return worth


@torch.no_grad()
def demand(
    expert: Tensor, answers: Answers, worth: Tensor, n_experts: int, n_classes: int
) -> Demand:
    """What the answers are worth in each row's expert [S]."""
    gain = torch.zeros(n_experts * n_classes)
    for part in chunks(len(expert), ROWS_AT_ONCE):
        keys = expert[part, None] * n_classes + answers.classes[part].long()  # [b,T]
        gain.index_add_(0, keys.flatten(), worth[part].flatten())
    gain = gain.view(n_experts, n_classes)
    return Demand(gain, torch.bincount(expert, minlength=n_experts).float(), gain)


def places_of_rest(
    log_chances: Tensor,  # [K,N]
    utilization: Tensor,  # [K]
    budget: float,
) -> Tensor:
    """The expert [N] that gets a copy of each class which none holds for its answers' sake.

    It is the one where the class has the best chance to be answered. Where all copies together
    would cost more than their part of the budget, busy experts are made dearer until they do not.
    """
    affordable = COPIES * budget
    low, high = 0.0, 1e6

    def placed(price: float) -> Tensor:
        return (log_chances - price * utilization[:, None]).argmax(dim=0)

    if utilization[placed(low)].sum() <= affordable:
        return placed(low)
    for _ in range(STEPS):
        middle = (low * high) ** 0.5 if low else high / 1e3
        if utilization[placed(middle)].sum() <= affordable:
            high = middle
        else:
            low = middle
    return placed(high)
