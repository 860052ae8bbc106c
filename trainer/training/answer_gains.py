"""What it is worth to hold a class: the right answers that it is expected to give.

b query rows scored at once, S query rows, N classes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from service.bundle.manifest import RECALL_AT
from trainer.training.head_answers import all_scores, destructive_logsumexp, largest


class Gains(NamedTuple):
    """The full softmax's first classes of query rows, and what holding each is worth."""

    best: Tensor  # [S,10]; fewer, if there are fewer classes
    value: Tensor  # [S,10]
    n_classes: int


@torch.no_grad()
def head_gains(head: Tensor, hidden: Tensor) -> Gains:
    """Of a full softmax [N,D], or [N,D+1] with biases, for query rows [S,D]."""
    last = min(RECALL_AT[-1], len(head))
    best = torch.empty(len(hidden), last, dtype=torch.int64)
    value = torch.empty(len(hidden), last)
    for part, scores in all_scores(head, hidden, len(hidden), "full softmax's answers"):
        best[part], value[part] = answer_gains(scores)
    return Gains(best, value, len(head))


def answer_gains(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The first classes of each row of scores [b,N], and what holding each is worth: both [b,10].

    The scores are lost. Where a class is missing, the class after the first 1, 5 or 10 takes its
    place. So the loss is the class's probability minus the probability of that one, summed over
    the three.
    """
    n_classes = scores.shape[1]
    last = min(RECALL_AT[-1], n_classes)
    values, best = largest(scores, min(last + 1, n_classes))
    probability = (values - destructive_logsumexp(scores)[:, None]).exp()
    value = torch.zeros_like(probability[:, :last])
    for rank in RECALL_AT:
        behind = probability[:, rank : rank + 1] if rank < probability.shape[1] else 0.0
        value[:, :rank] += probability[:, : min(rank, last)] - behind
    return best[:, :last], value
