"""Rescue: an idle expert starts anew as a clone of an overloaded one.

A gate that has hardened cannot repair its mistakes: where two clusters share an expert and another
expert is idle, the gradient of the balance loss has vanished. Cloning, as in mitosis, gives both
experts the same gate value again, and training divides the traffic between them.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.layer import DSSoftmax

IDLE, OVERLOADED = 0.75, 1.25  # times the mean load
NOISE = 0.01  # of the gate row's own size; breaks the tie between the clones


def idle_and_overloaded(load: Tensor) -> list[tuple[int, int]]:
    """Pairs of an idle and an overloaded expert, the extremes first, from the rows each got [K]."""
    relative = load / load.mean()
    ascending = torch.argsort(relative).tolist()
    idle = [expert for expert in ascending if relative[expert] < IDLE]
    overloaded = [expert for expert in reversed(ascending) if relative[expert] > OVERLOADED]
    return list(zip(idle, overloaded, strict=False))


@torch.no_grad()
def rescue(layer: DSSoftmax, optimizer: Optimizer, load: Tensor) -> int:
    """Clone overloaded experts over idle ones while all experts are whole; returns how many."""
    pairs = idle_and_overloaded(load)
    for idle, overloaded in pairs:
        source, target = layer.experts[overloaded], layer.experts[idle]
        target.copy_(source)
        for name, value in optimizer.state[source].items():
            optimizer.state[target][name].copy_(value)
        row = layer.gate[overloaded]
        layer.gate[idle] = row + NOISE * row.square().mean().sqrt() * torch.randn_like(row)
    return len(pairs)
