"""Measures of a trained layer on test rows.

B rows, D hidden, K experts, N classes.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from service.terminal import progress
from trainer.layer import DSSoftmax
from trainer.training.loop import Rows

CHUNK = 4096
RANKS = (1, 5, 10)


def chunks(n_rows: int) -> Iterator[slice]:
    for start in range(0, n_rows, CHUNK):
        yield slice(start, start + CHUNK)


@torch.no_grad()
def accuracy(layer: DSSoftmax, hidden: Tensor, labels: Tensor) -> float:
    """Share of rows [B,D] whose most probable class is the label [B]."""
    hits = sum(
        int((layer.predict(hidden[part]) == labels[part]).sum()) for part in chunks(len(hidden))
    )
    return hits / len(hidden)


@torch.no_grad()
def accuracy_at(layer: DSSoftmax, hidden: Tensor, labels: Tensor) -> dict[str, float]:
    """Share of rows [B,D] whose label [B] is among the first 1, 5 and 10 of the row's expert."""
    hits = dict.fromkeys(RANKS, 0)
    for part in chunks(len(hidden)):
        rank = layer.rank_of(hidden[part], labels[part])
        for k in RANKS:
            hits[k] += int((rank < k).sum())
    return {str(k): count / len(hidden) for k, count in hits.items()}


@torch.no_grad()
def full_accuracy_at(head: Tensor, hidden: Tensor, labels: Tensor) -> dict[str, float]:
    """The same of a full softmax [N,D]."""
    hits = dict.fromkeys(RANKS, 0)
    for part in chunks(len(hidden)):
        logits = hidden[part] @ head.T  # [b,N]
        above = logits > logits.gather(1, labels[part, None])
        for k in RANKS:
            hits[k] += int((above.sum(dim=1) < k).sum())
    return {str(k): count / len(hidden) for k, count in hits.items()}


@torch.no_grad()
def utilization(layer: DSSoftmax, hidden: Tensor) -> Tensor:
    """u_k: the share of rows that each expert receives, [K]."""
    counts = torch.bincount(layer.route(hidden).expert, minlength=layer.n_experts)
    return counts.double() / len(hidden)


@torch.no_grad()
def label_counts(gate: Tensor, inputs: Rows, labels: Tensor, n_classes: int) -> Tensor:
    """How many rows of each class a gate [K,D] sends to each expert, [K,N]."""
    counts = torch.zeros(len(gate) * n_classes)
    for part in progress.each(list(chunks(len(labels))), "counting labels"):
        rows = torch.arange(part.start, min(part.stop, len(labels)))
        expert = (inputs[rows] @ gate.T).argmax(dim=1)
        counts += torch.bincount(expert * n_classes + labels[rows], minlength=len(counts))
    return counts.view(len(gate), n_classes)


def copies(layer: DSSoftmax) -> Tensor:
    """In how many experts each class is, [N]."""
    return torch.bincount(layer.class_of_row, minlength=layer.n_classes)
