"""Which classes each expert holds: those that the head answers to the expert's query rows.

S query rows, K experts, N classes, T answers of the head.
"""

import torch
from torch import Tensor

from trainer.data.arrays import chunks
from trainer.training.fidelity.teacher import Answers
from trainer.training.metrics import ROWS_AT_ONCE
from trainer.training.warm_start import Demand

MEASURED = 10  # first answers, all of which count; the first one counts as much as all of them
FADING = 1.0  # logits behind the last of those at which an answer counts e times less
SHARED = 2  # experts that a query row speaks for


def values(answers: Answers) -> Tensor:
    """What it is worth to hold each of the head's answers, [S,T].

    Answers behind the first MEASURED are worth a little: they are among the first of rows alike.
    """
    scores = answers.scores
    last = min(MEASURED, scores.shape[1])
    worth = torch.full_like(scores, 0.5 / last)
    worth[:, last:] *= ((scores[:, last:] - scores[:, last - 1 : last]) / FADING).exp()
    worth[:, 0] += 0.5
    return worth


@torch.no_grad()
def demand(gate_logits: Tensor, answers: Answers, worth: Tensor, n_classes: int) -> Demand:
    """What the answers are worth in each expert, by where the gate [S,K] sends rows.

    A row speaks for its first experts by their gate values: neighbours of its expert receive rows
    like it.
    """
    n_rows, n_experts = gate_logits.shape
    gain = torch.zeros(n_experts * n_classes)
    rows = torch.zeros(n_experts)
    shared = min(SHARED, n_experts)
    for part in chunks(n_rows, ROWS_AT_ONCE):
        best = gate_logits[part].topk(shared, dim=1)
        share = torch.softmax(best.values, dim=1)  # [b,m]
        keys = best.indices[:, :, None] * n_classes + answers.classes[part, None].long()  # [b,m,T]
        gain.index_add_(0, keys.flatten(), (share[:, :, None] * worth[part, None]).flatten())
        rows.index_add_(0, best.indices.flatten(), share.flatten())
    return Demand(gain.view(n_experts, n_classes), rows, gain.view(n_experts, n_classes))
