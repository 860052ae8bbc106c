"""Adaptive softmax, PyTorch's: frequent classes in a head, rarer ones in clusters behind it.

A cluster is opened only if one of its classes could still be among the k best: none is more
probable than the cluster as a whole. So the answer is exact.

B rows, D hidden, N classes, H classes of the head, C clusters, k answers.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.baselines import training
from trainer.baselines.method import Baseline, Dial, Inputs, Search, limit

# Shares of the classes up to each cut, and by how much narrower each next cluster is.
SETTINGS = (((0.05, 0.25), 4.0), ((0.1, 0.4), 4.0), ((0.1, 0.4), 2.0), ((0.25, 0.5), 2.0))

Array = NDArray[np.float32]


@dataclass
class AdaptiveSearch(Search):
    """Weights as plain arrays: one row is answered without PyTorch's overhead."""

    head: Array  # [H+C,D]
    bias: Array  # [H+C]
    tails: list[tuple[Array, Array]]  # of each cluster: projection [w,D] and rows [b,w]
    order: NDArray[np.int64]  # [N] class of each place

    def topk(self, hidden: Array, k: int) -> NDArray[np.int64]:
        return self.counted(hidden, k)[0]

    def counted(self, hidden: Array, k: int) -> tuple[NDArray[np.int64], float]:
        n_clusters = len(self.tails)
        n_head = len(self.head) - n_clusters
        cost = self.head.size * len(hidden)
        log_prob = _log_softmax(hidden @ self.head.T + self.bias)  # [B,H+C]
        places, scores = _largest(log_prob[:, :n_head], k)  # [B,k]
        clusters = log_prob[:, n_head:]  # [B,C]
        offsets = n_head + np.cumsum([0, *(len(rows) for _, rows in self.tails)])
        for rank_of_cluster in range(n_clusters):
            chosen = np.argsort(-clusters, axis=1, kind="stable")[:, rank_of_cluster]  # [B]
            possible = np.take_along_axis(clusters, chosen[:, None], axis=1)[:, 0] >= scores[:, -1]
            if not possible.any():
                break
            for cluster in np.unique(chosen[possible]):
                opened = np.flatnonzero(possible & (chosen == cluster))
                projection, rows = self.tails[cluster]
                cost += (projection.size + rows.size) * len(opened)
                inside = _log_softmax(hidden[opened] @ projection.T @ rows.T)
                inside += clusters[opened, cluster, None]
                more, values = _largest(inside, min(k, len(rows)))
                both = np.concatenate([scores[opened], values], axis=1)
                names = np.concatenate([places[opened], more + offsets[cluster]], axis=1)
                best = np.argsort(-both, axis=1, kind="stable")[:, :k]
                scores[opened] = np.take_along_axis(both, best, axis=1)
                places[opened] = np.take_along_axis(names, best, axis=1)
        return self.order[places], float(cost)


def _log_softmax(logits: Array) -> Array:
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def _largest(scores: Array, k: int) -> tuple[NDArray[np.int64], Array]:
    """Positions and values of the k largest; minus infinity where there are fewer."""
    width = scores.shape[1]
    if width < k:
        lacking = np.full((len(scores), k - width), -np.inf, np.float32)
        scores = np.concatenate([scores, lacking], axis=1)
    elif width > k:
        found = np.argpartition(scores, width - k, axis=1)[:, width - k :]
        found.sort(axis=1)
        scores = np.take_along_axis(scores, found, axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")
    places = order if width <= k else np.take_along_axis(found, order, axis=1)
    # A lacking place is never answered: clusters are opened until there are k classes.
    return np.minimum(places, width - 1), np.take_along_axis(scores, order, axis=1)


def start(head: Tensor, cuts: list[int], div_value: float) -> nn.AdaptiveLogSoftmaxWithLoss:
    """The layer that is closest to a full softmax [N,D] whose classes are sorted by frequency."""
    n_classes, hidden_size = head.shape
    layer = nn.AdaptiveLogSoftmaxWithLoss(
        hidden_size, n_classes, cuts, div_value=div_value, head_bias=True
    )
    shortlist, *tails = head.tensor_split(cuts)
    with torch.no_grad():
        means = torch.stack([rows.mean(dim=0) for rows in tails])
        layer.head.weight.copy_(torch.cat([shortlist, means]))
        sizes = torch.tensor([math.log(len(rows)) for rows in tails])
        layer.head.bias.copy_(torch.cat([torch.zeros(len(shortlist)), sizes]))
        for (projection, rows), original in zip(layer.tail, tails, strict=True):
            left, values, right = torch.linalg.svd(original, full_matrices=False)
            width = min(len(projection.weight), len(values))
            projection.weight[:width] = right[:width]
            rows.weight.zero_()
            rows.weight[:, :width] = left[:, :width] * values[:width]
    return layer


def search(
    layer: nn.AdaptiveLogSoftmaxWithLoss, order: NDArray[np.int64], **seconds: float
) -> AdaptiveSearch:
    tails = [tuple(part.weight.detach().numpy() for part in tail) for tail in layer.tail]
    weight, bias = layer.head.weight.detach().numpy(), layer.head.bias.detach().numpy()
    return AdaptiveSearch(weight, bias, tails, order, **seconds)


class Adaptive(Baseline):
    """The dial is where clusters are cut and how narrow they are."""

    method = "adaptive"

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self._order = np.argsort(-inputs.frequencies(), kind="stable")

    def dials(self) -> list[Dial]:
        n_classes, epochs = self.inputs.n_classes, self.inputs.options.train_epochs
        return [
            Dial(
                {
                    "cutoffs": [
                        max(place + 1, round(n_classes * s)) for place, s in enumerate(cuts)
                    ],
                    "div_value": div_value,
                    "epochs": epochs,
                    **limit(self.inputs.options.train_rows),
                },
                "adaptive, cut at "
                + " and ".join(f"{100 * share:g}%" for share in cuts)
                + f", div {div_value:g}",
            )
            for cuts, div_value in SETTINGS
            if self.inputs.hidden_size >= div_value ** len(cuts)
        ]

    def facts(self) -> dict[str, Any]:
        options = self.inputs.options
        return {"rows": options.train_rows, "seed": options.seed}

    def build(self, dial: Dial) -> AdaptiveSearch:
        order = torch.from_numpy(self._order)
        place = torch.argsort(order)  # [N]
        started = time.perf_counter()
        head = torch.from_numpy(self.inputs.head.weight)[order]
        torch.manual_seed(self.inputs.options.seed)
        layer = start(head, dial.settings["cutoffs"], dial.settings["div_value"])
        build_seconds = time.perf_counter() - started

        def loss(hidden: Tensor, labels: Tensor, _: torch.Generator) -> Tensor:
            return layer(hidden, place[labels]).loss

        train_seconds = training.fit(
            layer,
            loss,
            self.inputs,
            self.inputs.folder(self.method, {**dial.settings, **self.facts()}),
            rounds=1,
            epochs=dial.settings["epochs"],
            n_rows=self.inputs.options.train_rows,
        )
        return search(layer, self._order, train_seconds=train_seconds, build_seconds=build_seconds)
