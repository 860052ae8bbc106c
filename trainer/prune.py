"""Pruning: rows whose norm falls under a threshold leave the layer.

K experts, N classes, R kept rows, D hidden.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer import losses
from trainer.layer import DSSoftmax


def rows_above(layer: DSSoftmax, threshold: float) -> Tensor:
    """The [R] mask of rows whose (root mean square) norm is at least `threshold`."""
    return layer.row_squares().detach().sqrt() >= threshold


def keep_one_copy(layer: DSSoftmax, kept: Tensor, contexts: Tensor) -> Tensor:
    """Spare, for each class about to lose its last copy, its best one.

    Best is the copy in the expert that received most of the class's contexts (counted per row in
    `contexts` [R]), and among equals the one of largest norm. A class without a copy stays so.
    """
    classes = layer.class_of_row
    survives = torch.zeros(layer.n_classes, dtype=torch.bool, device=kept.device)
    survives[classes[kept]] = True
    endangered = (~survives[classes]).nonzero()[:, 0]  # rows of classes with no surviving copy
    norms = layer.row_squares().detach()[endangered]
    # Two stable sorts: by norm, then by contexts; the last row of each class is its best.
    order = endangered[torch.argsort(norms, stable=True)]
    order = order[torch.argsort(contexts[order], stable=True)]
    best = torch.full((layer.n_classes,), -1, device=kept.device)
    for_class = classes[order]
    rank = torch.arange(len(order), device=kept.device)
    best.scatter_reduce_(0, for_class, rank, "amax")
    kept = kept.clone()
    kept[order[best[best >= 0]]] = True
    return kept


def prune(layer: DSSoftmax, optimizer: Optimizer, kept: Tensor) -> None:
    """Drop rows from the layer and, with them, from the optimizer's state."""
    before, masks = list(layer.experts), kept.split(layer.expert_sizes)
    layer.keep_rows(kept)
    successor = dict(zip(before, layer.experts, strict=True))
    for group in optimizer.param_groups:
        group["params"] = [successor.get(parameter, parameter) for parameter in group["params"]]
    for old, mask in zip(before, masks, strict=True):
        optimizer.state[successor[old]] = {
            name: value[mask] if torch.is_tensor(value) and value.shape == old.shape else value
            for name, value in optimizer.state.pop(old, {}).items()
        }


def shrink(layer: DSSoftmax, amount: float) -> None:
    """The proximal step of the class-level lasso: every row's norm is lowered by `amount`.

    A row whose norm is under `amount` becomes exactly zero, which a sub-gradient never does.
    """
    for expert in layer.experts:
        weight = expert.detach()
        norms = losses.row_squares(weight).sqrt()
        factors = (1 - amount / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_min(0)
        weight.mul_(factors[:, None])
