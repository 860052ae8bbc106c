"""Pruning: rows whose norm falls under a threshold leave the layer.

K experts, N classes, R kept rows, D hidden.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.layer import DSSoftmax, losses


def rows_above(layer: DSSoftmax, threshold: float) -> Tensor:
    """The [R] mask of rows whose (root mean square) norm is at least `threshold`."""
    return layer.row_squares().detach().sqrt() >= threshold


def keep_one_copy(layer: DSSoftmax, kept: Tensor, contexts: Tensor) -> Tensor:
    """Spare, for each class about to lose its last copy, its best one.

    Best is the copy in the expert that received most of the class's contexts (counted per row in
    `contexts` [R]), and among equals the one of largest norm. A class without a copy stays so.
    """
    return spare_best(layer.class_of_row, kept, contexts, layer.row_squares().detach())


def spare_best(classes: Tensor, kept: Tensor, contexts: Tensor, norms: Tensor) -> Tensor:
    """The [R] mask `kept` and, for each class of which it has no row, the best one."""
    n_classes = int(classes.max()) + 1 if len(classes) else 0
    survives = torch.zeros(n_classes, dtype=torch.bool, device=kept.device)
    survives[classes[kept]] = True
    endangered = (~survives[classes]).nonzero()[:, 0]  # rows of classes with no surviving copy
    # Two stable sorts: by norm, then by contexts; the last row of each class is its best.
    order = endangered[torch.argsort(norms[endangered], stable=True)]
    order = order[torch.argsort(contexts[order], stable=True)]
    best = torch.full((n_classes,), -1, device=kept.device)
    rank = torch.arange(len(order), device=kept.device)
    best.scatter_reduce_(0, classes[order], rank, "amax")
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


def shrink(layer: DSSoftmax, optimizer: Optimizer, strength: float) -> None:
    """The proximal step of the class-level lasso, in the metric in which Adam makes its steps.

    Adam divides a row's gradient by its recent size, so the lasso's pull on the row is divided by
    the same: a row that the data hardly asks for goes to zero at once, one that it asks for often
    barely moves. A sub-gradient never gives exact zeros, and gets lost among Adam's averages.
    """
    for expert in layer.experts:
        weight = expert.detach()  # [V,D]
        norms = losses.row_squares(weight).sqrt()  # [V]
        amount = strength / (weight.shape[1] * gradient_size(optimizer, expert))
        factors = (1 - amount / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_min(0)
        weight.mul_(factors[:, None])


def gradient_size(optimizer: Optimizer, parameter: Tensor) -> Tensor:
    """The root mean square of each row's recent gradients, as Adam has it: [V]."""
    (group,) = optimizer.param_groups
    state = optimizer.state[parameter]
    settled = 1 - group["betas"][1] ** float(state["step"])
    return (state["exp_avg_sq"].mean(dim=1) / settled).sqrt() + group["eps"]
