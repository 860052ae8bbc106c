"""Pruning: weight rows whose norm falls under a threshold are dropped from the layer.

K experts, N classes, R weight rows, V weight rows of one expert, D hidden.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.layer import DSSoftmax, losses


def rows_above(layer: DSSoftmax, threshold: float) -> Tensor:
    """The [R] mask of weight rows whose (root mean square) norm is at least `threshold`."""
    return layer.row_squares().detach().sqrt() >= threshold


def keep_one_copy(layer: DSSoftmax, kept: Tensor, contexts: Tensor) -> Tensor:
    """Keep the best copy of each class that would lose all of its copies.

    Best is the copy in the expert that received most query rows of the class (counted for each
    weight row in `contexts` [R]), and among equals the one of largest norm. A class that has no
    copy gets none.
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
    """Drop weight rows from the layer, and their entries from the optimizer's state."""
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

    Adam divides a weight row's gradient by its recent size, so the lasso's gradient is divided by
    the same: rows with small task gradients go to zero at once, rows with large ones barely move.
    A sub-gradient in the objective never gives exact zeros, and is small in Adam's averages.
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
