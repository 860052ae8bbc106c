"""Measures of a trained layer on query rows.

B query rows, D hidden, K experts, N classes.
"""

import torch
from torch import Tensor

from service.bundle.manifest import RECALL_AT
from service.terminal import progress
from trainer.data.arrays import chunks
from trainer.data.rows import Rows
from trainer.layer import DSSoftmax
from trainer.layer.bias import logits

ROWS_AT_ONCE = 4096


@torch.no_grad()
def accuracy(layer: DSSoftmax, hidden: Tensor, labels: Tensor) -> float:
    """Share of rows [B,D] whose most probable class is the label [B]."""
    hits = 0
    for part in chunks(len(hidden), ROWS_AT_ONCE):
        hits += int((layer.predict(hidden[part]) == labels[part]).sum())
    return hits / len(hidden)


@torch.no_grad()
def accuracy_at(layer: DSSoftmax, hidden: Tensor, labels: Tensor) -> dict[str, float]:
    """Share of rows [B,D] whose label [B] is among the first 1, 5 and 10 of the row's expert."""
    hits = dict.fromkeys(RECALL_AT, 0)
    for part in chunks(len(hidden), ROWS_AT_ONCE):
        rank = layer.rank_of(hidden[part], labels[part])
        for k in RECALL_AT:
            hits[k] += int((rank < k).sum())
    return {str(k): count / len(hidden) for k, count in hits.items()}


@torch.no_grad()
def full_accuracy_at(head: Tensor, hidden: Tensor, labels: Tensor) -> dict[str, float]:
    """The same of a full softmax [N,D], or [N,D+1] with biases."""
    hits = dict.fromkeys(RECALL_AT, 0)
    for part in chunks(len(hidden), ROWS_AT_ONCE):
        scores = logits(hidden[part], head)  # [b,N]
        above = scores > scores.gather(1, labels[part, None])
        for k in RECALL_AT:
            hits[k] += int((above.sum(dim=1) < k).sum())
    return {str(k): count / len(hidden) for k, count in hits.items()}


@torch.no_grad()
def utilization(layer: DSSoftmax, hidden: Tensor) -> Tensor:
    """u_k: the share of rows that each expert receives, [K]."""
    counts = torch.bincount(layer.route(hidden).expert, minlength=layer.n_experts)
    return counts.double() / len(hidden)


@torch.no_grad()
def label_counts(gate: Tensor, inputs: Rows, labels: Tensor, n_classes: int) -> Tensor:
    """How many rows of each class a gate [K,D], or [K,D+1], sends to each expert, [K,N]."""
    counts = torch.zeros(len(gate) * n_classes)
    for part in progress.each(list(chunks(len(labels), ROWS_AT_ONCE)), "counting labels"):
        rows = torch.arange(part.start, part.stop)
        expert = logits(inputs[rows], gate).argmax(dim=1)
        counts += torch.bincount(expert * n_classes + labels[rows], minlength=len(counts))
    return counts.view(len(gate), n_classes)


def copies(layer: DSSoftmax) -> Tensor:
    """In how many experts each class is, [N]."""
    return torch.bincount(layer.class_of_row, minlength=layer.n_classes)
