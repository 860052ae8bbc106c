"""What the full softmax answers: its first classes, and how probable it finds the labels.

All classes are scored, which for many classes is most of the work there is before training. Scores
of few query rows at a time go into one buffer, that is allocated once.

b query rows scored at once, T query rows, D hidden, N classes, k answers.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from service.bundle.manifest import RECALL_AT
from service.terminal import progress
from trainer.data.arrays import chunks
from trainer.data.rows import Rows
from trainer.layer.bias import with_one

IN_CACHE, AT_MOST = 2**20, 2**25  # scores at once, if that is enough for LEAST_ROWS; and if not
LEAST_ROWS = 128  # with fewer a product reads the head more often than it computes
BLOCK = 64  # columns whose largest is found first
LEAST_BLOCKS = 64  # with fewer it is not worth the while


class HeadAnswers(NamedTuple):
    best: Tensor  # [T,10] the first classes; fewer, if there are fewer
    log_prob: Tensor  # [T] of the label
    rank: Tensor  # [T] how many classes score above the label

    def accuracy_at(self) -> dict[str, float]:
        """Share of rows whose label is among the first 1, 5 and 10."""
        return {str(k): (self.rank < k).double().mean().item() for k in RECALL_AT}


@torch.no_grad()
def head_answers(head: Tensor, hidden: Tensor, labels: Tensor) -> HeadAnswers:
    """Of a full softmax [N,D], or [N,D+1] with biases, to query rows [T,D] with labels [T]."""
    k = min(RECALL_AT[-1], len(head))
    best = torch.empty(len(hidden), k, dtype=torch.int64)
    log_prob = torch.empty(len(hidden))
    rank = torch.empty(len(hidden), dtype=torch.int64)
    for part, scores in all_scores(head, hidden, len(hidden), "full softmax's answers"):
        own = scores.gather(1, labels[part, None])  # [b,1]
        best[part] = largest(scores, k)[1]
        rank[part] = (scores > own).sum(dim=1, dtype=torch.int32)
        log_prob[part] = own[:, 0] - destructive_logsumexp(scores)
    return HeadAnswers(best, log_prob, rank)


def all_scores(
    head: Tensor, rows: Rows, n_rows: int, description: str
) -> Iterator[tuple[slice, Tensor]]:
    """Scores [b,N] of some query rows after the others; each is gone when the next is asked for."""
    at_once = rows_at_once(len(head))
    buffer = torch.empty(min(at_once, n_rows), len(head))
    for part in progress.each(list(chunks(n_rows, at_once)), description):
        hidden = rows[torch.arange(part.start, part.stop)]  # [b,D]
        if head.shape[1] > hidden.shape[1]:
            hidden = with_one(hidden)
        yield part, torch.mm(hidden, head.T, out=buffer[: len(hidden)])


def rows_at_once(n_classes: int) -> int:
    rows = max(LEAST_ROWS, min(4096, IN_CACHE // n_classes))
    return max(1, min(rows, AT_MOST // n_classes))


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As `scores.topk(k)` along rows, but faster for many columns: values and columns, [b,k].

    The k largest lie in the k blocks of columns whose maxima are the largest.
    """
    n_blocks = scores.shape[1] // BLOCK
    if n_blocks < max(LEAST_BLOCKS, k):
        found = scores.topk(k, dim=1)
        return found.values, found.indices
    whole = n_blocks * BLOCK
    # Block j has the columns j, j + n_blocks, ...: maxima are of whole vectors then.
    maxima = scores[:, :whole].unflatten(1, (BLOCK, n_blocks)).amax(dim=1)  # [b,n_blocks]
    blocks = maxima.topk(k, dim=1).indices  # [b,k]
    columns = (blocks[:, :, None] + n_blocks * torch.arange(BLOCK)).flatten(1)  # [b,k*64]
    rest = torch.arange(whole, scores.shape[1]).expand(len(scores), -1)
    columns = torch.cat([columns, rest], dim=1)
    found = scores.gather(1, columns).topk(k, dim=1)
    return found.values, columns.gather(1, found.indices)


def destructive_logsumexp(scores: Tensor) -> Tensor:
    """`scores.logsumexp(1)` without a copy of the scores [b,N], which are lost."""
    most = scores.amax(dim=1, keepdim=True)
    return scores.sub_(most).exp_().sum(dim=1).log_().add_(most[:, 0])
