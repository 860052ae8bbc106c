"""Rescue: an idle expert starts anew as a clone of an overloaded one.

A gate that has hardened cannot repair its mistakes: where two clusters share an expert and another
expert is idle, the gradient of the balance loss has vanished. Cloning, as in mitosis, gives both
experts about the same gate value again. Their gates lean to either side of the direction in which
the overloaded expert's rows vary most, so each clone takes about half of the traffic.

D hidden, K experts, b rows of the overloaded expert in the last batch.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.layer import DSSoftmax

IDLE, OVERLOADED = 0.75, 1.25  # times the mean load
LEAN = 1.0  # standard deviation of the gate logits' difference between clones


def idle_and_overloaded(load: Tensor) -> list[tuple[int, int]]:
    """Pairs of an idle and an overloaded expert, the extremes first, from the rows each got [K]."""
    relative = load / load.mean()
    ascending = torch.argsort(relative).tolist()
    idle = [expert for expert in ascending if relative[expert] < IDLE]
    overloaded = [expert for expert in reversed(ascending) if relative[expert] > OVERLOADED]
    return list(zip(idle, overloaded, strict=False))


@torch.no_grad()
def rescue(
    layer: DSSoftmax, optimizer: Optimizer, load: Tensor, hidden: Tensor, expert: Tensor
) -> int:
    """Clone overloaded experts over idle ones while all experts are whole; returns how many.

    `load` [K] is the recent traffic; `hidden` [B,D] and `expert` [B] are those of the last batch.
    """
    pairs = idle_and_overloaded(load)
    for idle, overloaded in pairs:
        source, target = layer.experts[overloaded], layer.experts[idle]
        target.copy_(source)
        state = optimizer.state[source]
        optimizer.state[target] = {name: value.clone() for name, value in state.items()}
        lean = leaning(layer.extended(hidden[expert == overloaded])) * (LEAN / 2)
        layer.gate[idle] = layer.gate[overloaded] + lean
        layer.gate[overloaded] -= lean
    return len(pairs)


def leaning(rows: Tensor) -> Tensor:
    """A direction [D] along which rows [b,D] have mean 0 and standard deviation 1.

    The gate has no bias, so the direction is orthogonal to the mean row.
    """
    if len(rows) < 2:
        return torch.zeros(rows.shape[1])
    mean = rows.mean(dim=0)
    unit = mean / mean.norm().clamp_min(torch.finfo(mean.dtype).tiny)
    across = rows - (rows @ unit)[:, None] * unit  # [b,D]
    direction = torch.linalg.svd(across, full_matrices=False).Vh[0]
    return direction / (across @ direction).std().clamp_min(torch.finfo(mean.dtype).tiny)
