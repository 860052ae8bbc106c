"""Facts that a server compares live traffic with: the distribution of the best gate value, and how
many of the full softmax's first classes are the layer's too.

S query rows, D hidden, K experts, N classes.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from service.bundle.manifest import MOST_GATE_EDGES, RECALL_AT, GateFacts
from trainer.data.arrays import Head, chunks
from trainer.layer import DSSoftmax

DECIMALS = 4  # of edges: processors round the gate differently, which must not count as drift
ROWS_AT_ONCE = 64  # all classes are scored


def gate_facts(
    hidden: NDArray[np.float32],  # [S,D]
    gate: NDArray[np.float32],  # [K,D]
    bias: NDArray[np.float32] | None,  # [K]
) -> GateFacts:
    """The shares of rows between the deciles of the first choice's gate value."""
    logits = hidden @ gate.T + (0.0 if bias is None else bias)  # [S,K]
    values = 1.0 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)  # [S]
    levels = np.arange(1, MOST_GATE_EDGES + 1) / (MOST_GATE_EDGES + 1)
    edges = np.unique(np.round(np.quantile(values, levels), DECIMALS))
    edges = edges[edges < values.max()]
    counts = np.bincount(np.searchsorted(edges, values), minlength=len(edges) + 1)
    return GateFacts(edges=edges.tolist(), shares=(counts / len(values)).tolist())


def head_recall(
    layer: DSSoftmax,
    hidden: NDArray[np.float32],  # [S,D]
    head: Head,
) -> dict[str, float]:
    """Recall by k: the share of the full softmax's first k classes that are the layer's too."""
    k = min(max(RECALL_AT), len(head.weight))
    weight = torch.from_numpy(head.weight)
    hits = dict.fromkeys([at for at in RECALL_AT if at <= k], 0)
    for part in chunks(len(hidden), ROWS_AT_ONCE):
        rows = torch.from_numpy(hidden[part])  # [b,D]
        scores = rows @ weight.T  # [b,N]
        if head.bias is not None:
            scores += torch.from_numpy(head.bias)
        full = scores.topk(k).indices  # [b,k]
        own = layer.topk(rows, k).classes  # [b,k]
        for at in hits:
            hits[at] += int((own[:, :at, None] == full[:, None, :at]).sum())
    return {str(at): found / (at * len(hidden)) for at, found in hits.items()}
