"""Measures of a trained layer on query rows.

B query rows, D hidden, K experts, N classes, k answers.
"""

import math

import torch
from torch import Tensor

from service.bundle.manifest import RECALL_AT
from service.terminal import progress
from trainer.data.arrays import chunks
from trainer.data.rows import Rows
from trainer.layer import DSSoftmax
from trainer.layer.bias import logits

ROWS_AT_ONCE = 4096
MOST_NATS = 700.0  # a mean loss beyond which a perplexity is no finite number


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
def precision_at(layer: DSSoftmax, hidden: Tensor, best: Tensor) -> dict[str, float | None]:
    """Share of the full softmax's first 1, 5 and 10 classes that are among the layer's as many.

    `best` [B,10] are the full softmax's; None where there are fewer classes than that.
    """
    possible = [k for k in RECALL_AT if k <= min(best.shape[1], reachable_classes(layer))]
    shared = dict.fromkeys(possible, 0)
    for part in chunks(len(hidden), ROWS_AT_ONCE):
        for k in possible:
            # Anew for each k: a longer answer may search more experts, and rank otherwise.
            found = layer.first_classes(hidden[part], k)  # [b,k]
            shared[k] += int((found[:, :, None] == best[part, None, :k]).sum())
    return {str(k): shared[k] / (k * len(hidden)) if k in shared else None for k in RECALL_AT}


def reachable_classes(layer: DSSoftmax) -> int:
    return int((copies(layer) > 0).sum())


@torch.no_grad()
def reachable_recall(layer: DSSoftmax, hidden: Tensor, best: Tensor) -> dict[str, float]:
    """Share of the full softmax's first 1 and 10 classes [B,10] that the row's expert holds.

    No layer with this gate and these classes can have a higher precision.
    """
    held = torch.empty(best.shape, dtype=torch.bool)
    for part in chunks(len(hidden), ROWS_AT_ONCE):
        expert = layer.route(hidden[part]).expert[:, None].expand(-1, best.shape[1])
        held[part] = layer.row_of(expert.reshape(-1), best[part].reshape(-1))[1].view_as(expert)
    return {str(k): held[:, :k].double().mean().item() for k in (RECALL_AT[0], RECALL_AT[-1])}


@torch.no_grad()
def label_log_probs(layer: DSSoftmax, hidden: Tensor, labels: Tensor) -> Tensor:
    """Of the labels [B], by the log-probabilities that the layer gives to all classes: [B]."""
    parts = chunks(len(hidden), ROWS_AT_ONCE)
    return torch.cat([layer(hidden[part], labels[part]).output for part in parts]).double()


def perplexity(mean_log_prob: float) -> float:
    return math.exp(min(MOST_NATS, -mean_log_prob))


@torch.no_grad()
def utilization(layer: DSSoftmax, hidden: Tensor) -> Tensor:
    """u_k: the share of rows that each expert receives, [K]."""
    counts = torch.bincount(layer.route(hidden).expert, minlength=layer.n_experts)
    return counts.double() / len(hidden)


@torch.no_grad()
def label_counts(gate: Tensor, inputs: Rows, labels: Tensor, n_classes: int) -> Tensor:
    """How many rows of each class a gate [K,D], or [K,D+1], sends to each expert, [K,N]."""
    counts = torch.zeros(len(gate) * n_classes)  # added to in place: a chunk has few pairs
    for part in progress.each(list(chunks(len(labels), ROWS_AT_ONCE)), "counting labels"):
        rows = torch.arange(part.start, part.stop)
        expert = logits(inputs[rows], gate).argmax(dim=1)
        counts.index_add_(0, expert * n_classes + labels[rows], torch.ones(len(rows)))
    return counts.view(len(gate), n_classes)


def copies(layer: DSSoftmax) -> Tensor:
    """In how many experts each class is, [N]."""
    return torch.bincount(layer.class_of_row, minlength=layer.n_classes)
