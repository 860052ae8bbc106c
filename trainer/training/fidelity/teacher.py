"""What the head answers to query rows: its first classes, their scores, and its normaliser.

S query rows, b of them scored at once, D hidden, N classes, T answers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from service.terminal import progress
from trainer.data.arrays import chunks
from trainer.layer.bias import with_one

SCORES_AT_ONCE = 2**23  # 32 MB of logits
BLOCK = 64  # classes of which the best are looked at first


@dataclass(frozen=True)
class Answers:
    classes: Tensor  # [S,T] int32, best first
    scores: Tensor  # [S,T]
    logsumexp: Tensor  # [S] over all classes

    def __len__(self) -> int:
        return len(self.classes)

    def first(self, count: int) -> "Answers":
        """Only the first so many answers of each row."""
        return Answers(self.classes[:, :count], self.scores[:, :count], self.logsumexp)


@torch.no_grad()
def head_answers(hidden: Tensor, head: Tensor, n_answers: int) -> Answers:
    """Of query rows [S,D] in memory and a head [N,D], or [N,D+1] with biases."""
    n_rows, n_classes = len(hidden), len(head)
    n_answers = min(n_answers, n_classes)
    found = Answers(
        torch.empty(n_rows, n_answers, dtype=torch.int32),
        torch.empty(n_rows, n_answers),
        torch.empty(n_rows),
    )
    at_once = max(1, min(1024, SCORES_AT_ONCE // n_classes))
    # Allocated once: small results between large products would fragment memory.
    logits = torch.empty(at_once, n_classes)  # [b,N]
    for part in progress.each(list(chunks(n_rows, at_once)), "the head's answers"):
        rows = hidden[part].float()  # [b,D]
        if head.shape[1] > rows.shape[1]:
            rows = with_one(rows)
        scored = torch.mm(rows, head.T, out=logits[: len(rows)])
        found.scores[part], found.classes[part] = largest(scored, n_answers)
        found.logsumexp[part] = scored.logsumexp(dim=1)
    return found


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`topk` along rows [b,N]: values and places [b,count].

    The largest are in the blocks with the largest maxima; finding those first is several times as
    fast as a partial sort of all.
    """
    n = scores.shape[1]
    blocks = n // BLOCK
    if blocks < 4 * count:
        return scores.topk(count, dim=1)
    tops = scores[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK)).amax(dim=2)
    first = tops.topk(count, dim=1, sorted=False).indices * BLOCK  # [b,count]
    places = (first[:, :, None] + torch.arange(BLOCK)).flatten(1)
    tail = torch.arange(blocks * BLOCK, n).expand(len(scores), -1)
    places = torch.cat([places, tail], dim=1)
    values, order = scores.gather(1, places).topk(count, dim=1)
    return values, places.gather(1, order)
