"""Rescue: an idle expert is replaced by a clone of an overloaded one.

Once the gate's softmax is saturated the gradient of the balance loss vanishes, so two clusters that
share an expert stay there although another expert is idle. Cloning, as in mitosis, gives both
experts about the same gate value again. Their gate rows are moved apart along the direction in
which the overloaded expert's query rows vary most, so each clone takes about half of them.

D hidden, K experts, b query rows of the overloaded expert in the last batch.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.layer import DSSoftmax

IDLE, OVERLOADED = 0.75, 1.25  # times the mean load
SEPARATION = 1.0  # standard deviation of the gate logits' difference between clones


def idle_and_overloaded(load: Tensor) -> list[tuple[int, int]]:
    """Pairs of an idle and an overloaded expert, extremes first, by query rows received [K]."""
    relative = load / load.mean()
    ascending = torch.argsort(relative).tolist()
    idle = [expert for expert in ascending if relative[expert] < IDLE]
    overloaded = [expert for expert in reversed(ascending) if relative[expert] > OVERLOADED]
    return list(zip(idle, overloaded, strict=False))


@torch.no_grad()
def rescue(
    layer: DSSoftmax, optimizer: Optimizer, load: Tensor, hidden: Tensor, expert: Tensor
) -> int:
    """Replace idle experts by clones of overloaded ones, before any is pruned; returns how many.

    `load` [K] is the recent traffic; `hidden` [B,D] and `expert` [B] are those of the last batch.
    """
    pairs = idle_and_overloaded(load)
    for idle, overloaded in pairs:
        source, target = layer.experts[overloaded], layer.experts[idle]
        target.copy_(source)
        state = optimizer.state[source]
        optimizer.state[target] = {name: value.clone() for name, value in state.items()}
        apart = split_direction(layer.extended(hidden[expert == overloaded])) * (SEPARATION / 2)
        layer.gate[idle] = layer.gate[overloaded] + apart
        layer.gate[overloaded] -= apart
    return len(pairs)


def split_direction(rows: Tensor) -> Tensor:
    """A direction [D] along which query rows [b,D] have mean 0 and standard deviation 1.

    It is orthogonal to the mean row: half of the rows are on either side of it.
    """
    if len(rows) < 2:
        return torch.zeros(rows.shape[1])
    mean = rows.mean(dim=0)
    unit = mean / mean.norm().clamp_min(torch.finfo(mean.dtype).tiny)
    across = rows - (rows @ unit)[:, None] * unit  # [b,D]
    direction = torch.linalg.svd(across, full_matrices=False).Vh[0]
    return direction / (across @ direction).std().clamp_min(torch.finfo(mean.dtype).tiny)
