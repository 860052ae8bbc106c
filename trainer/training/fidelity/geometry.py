"""How likely it is that a class is among the head's first answers in an expert, by geometry alone.

A sample shows only some of the answers that rows of an expert can have. Where it never showed a
class, its weight row and the spread of the expert's query rows still say how near it comes.

S query rows, D hidden, K experts, N classes, r directions.
"""

import math

import torch
from torch import Tensor

from trainer.data.arrays import chunks
from trainer.layer.bias import with_one

DIRECTIONS = 32  # in which an expert's query rows vary most; what is left is taken as independent
CLASSES_AT_ONCE = 65_536
LEAST_ROWS = 2
NONE = -1e6


@torch.no_grad()
def log_chances(
    hidden: Tensor, expert: Tensor, last: Tensor, head: Tensor, n_experts: int
) -> Tensor:
    """The log of the chance [K,N] that a class of the head [N,D] scores above a row's last answer.

    Rows [S,D] of an expert [S] are taken as normally distributed, together with the score [S] of
    their last answer that counts. An expert without rows gives no class a chance.
    """
    if head.shape[1] > hidden.shape[1]:
        hidden = with_one(hidden)
    found = torch.full((n_experts, len(head)), NONE)
    for number in range(n_experts):
        rows = (expert == number).nonzero()[:, 0]
        if len(rows) < LEAST_ROWS:
            continue
        x, t = hidden[rows], last[rows]
        mean, level = x.mean(dim=0), t.mean()
        x, t = x - mean, t - level
        # Margins are w.x - t: the direction of t is taken along, so that its part cancels.
        n_directions = min(DIRECTIONS, x.shape[1], len(rows))
        _, spread, directions = torch.svd_lowrank(x, q=n_directions, niter=1)  # [r], [D,r]
        spread = spread / math.sqrt(len(rows))
        left = (x.square().mean(dim=0) - (directions * spread).square().sum(dim=1)).clamp_min(0)
        with_last = x.T @ t / len(rows)  # [D] covariance of rows and last scores
        for part in chunks(len(head), CLASSES_AT_ONCE):
            weight = head[part]  # [n,D]
            variance = (weight @ (directions * spread)).square().sum(dim=1)
            variance += weight.square() @ left - 2 * (weight @ with_last) + t.square().mean()
            margin = weight @ mean - level
            score = margin / variance.clamp_min(1e-12).sqrt()
            found[number, part] = torch.special.log_ndtr(score).clamp_min(NONE)
    return found
