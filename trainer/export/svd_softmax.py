"""SVD-softmax inside experts (Shim et al. 2017), and what an engine must answer with it, in NumPy.

An expert's matrix W is nearly one of low rank. Along its first right singular vectors P all of its
classes are scored cheaply, and only those that look best are scored exactly. A bias is no part of
the decomposition: it is added to cheap and exact scores alike.

B query rows, D hidden, K experts, N classes, V classes of one expert, w directions, c candidates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from service.bundle.graphs import Preview
from service.errors import DSSError
from service.terminal import progress
from trainer.data.arrays import chunks
from trainer.layer import DSSoftmax

Floats = NDArray[np.floating[Any]]
Mask = NDArray[np.bool_]

# Single precision may order two cheap scores either way if they are this near, relative to the
# largest one.
NEAR = 1e-5
ROWS_AT_ONCE = 200


class WindowOutOfRange(DSSError):
    pass


class ShareOutOfRange(DSSError):
    pass


@dataclass(frozen=True)
class Approximation:
    """Which experts get a preview, and of what size."""

    window: int  # w, at most D
    share: float  # of an expert's classes that are scored exactly
    above: int = 1000  # experts of more classes than this are approximated

    def previews(self, weights: list[NDArray[np.float32]]) -> dict[int, Preview]:
        """By expert, from the experts' matrices [V,D] without bias."""
        hidden_size = weights[0].shape[1]
        if not 1 <= self.window <= hidden_size:
            raise WindowOutOfRange(f"The window is {self.window}; 1 to {hidden_size} is possible.")
        if not 0 < self.share <= 1:
            raise ShareOutOfRange(f"The share is {self.share}; above 0 and up to 1 is possible.")
        large = [expert for expert, weight in enumerate(weights) if len(weight) > self.above]
        return {
            expert: preview(weights[expert], self.window, self.share)
            for expert in progress.each(large, "approximating experts")
        }


def preview(weight: NDArray[np.float32], window: int, share: float) -> Preview:
    wide = weight.astype(np.float64)
    directions = np.linalg.svd(wide, full_matrices=False)[2][:window]  # [w,D]
    # Rounded first: 0.07 * 100 is a little more than 7.
    candidates = max(1, ceil(round(share * len(weight), 6)))
    return Preview(
        directions.astype(np.float32), (wide @ directions.T).astype(np.float32), candidates
    )


# --- the answers of an approximated layer ----------------------------------------------------


class Bounds(NamedTuple):
    """Log-probabilities [B,N] of the classes an engine may answer, -inf for the others.

    Rounding may decide which of two classes is the last candidate, and so whether its exact or its
    cheap score is in the normaliser. `low` has the classes that are candidates either way, `high`
    all that may be; where rounding decides nothing they are equal.
    """

    low: Floats
    high: Floats


class ApproximatedLayer:
    """A layer with some experts approximated: the answers that are right, in double precision."""

    def __init__(self, layer: DSSoftmax, previews: Mapping[int, Preview]) -> None:
        self.n_classes, self.n_experts = layer.n_classes, layer.n_experts
        self.previews = previews
        self._layer = layer
        self._gate = _weights_and_biases(layer, layer.gate)
        self._experts = [_weights_and_biases(layer, expert) for expert in layer.experts]
        self._classes = [c.numpy() for c in layer.class_of_row.split(layer.expert_sizes)]

    @property
    def costs(self) -> list[float]:
        """What a row costs each expert, in classes scored exactly."""
        hidden_size = self._layer.in_features
        return [
            self.previews[expert].size.cost(size, hidden_size) if expert in self.previews else size
            for expert, size in enumerate(self._layer.expert_sizes)
        ]

    def agreement(self, hidden: NDArray[np.float32]) -> float:
        """Share of rows whose first answer is that of the layer as it was trained."""
        same = 0
        for part in chunks(len(hidden), ROWS_AT_ONCE):
            first = self.searched(hidden[part], 1).high.argmax(axis=1)
            expected = self._layer.predict(torch.from_numpy(hidden[part])).numpy()
            same += int((first == expected).sum())
        return same / len(hidden)

    def searched(self, hidden: NDArray[np.float32], k: int, experts: int = 1) -> Bounds:
        """As `DSSoftmax.searched`, with the classes that are not candidates left out."""
        inputs = hidden.astype(np.float64)
        weight, bias = self._gate
        logits = inputs @ weight.T + bias  # [B,K]
        gates = np.exp(logits - logits.max(axis=1, keepdims=True))
        gates /= gates.sum(axis=1, keepdims=True)
        ranked = np.argsort(-gates, axis=1, kind="stable")  # [B,K]
        gates = np.take_along_axis(gates, ranked, axis=1)
        shape = (len(hidden), self.n_classes)
        found = Bounds(np.full(shape, -np.inf), np.full(shape, -np.inf))
        held = np.zeros(shape, bool)
        for rank in range(self.n_experts):
            todo = np.ones(len(hidden), bool) if rank < experts else held.sum(axis=1) < k
            for expert in np.unique(ranked[todo, rank]):
                rows = np.flatnonzero(todo & (ranked[:, rank] == expert))
                where = np.ix_(rows, self._classes[expert])
                held[where] = True
                penalty = np.log(gates[rows, rank] / gates[rows, 0])
                bounds = self._scored(expert, inputs[rows], gates[rows, :1], k)  # [b,V] each
                for best, scores in zip(found, bounds, strict=True):
                    best[where] = np.maximum(best[where], scores + penalty[:, None])
        return found

    def _scored(self, expert: int, hidden: Floats, gate: Floats, k: int) -> Bounds:
        """Bounds [b,V] on one expert's log-probabilities."""
        (weight, bias), shown = self._experts[expert], self.previews.get(expert)
        exact = gate * (hidden @ weight.T + bias)  # [b,V]
        if shown is None:
            scores = exact - self._logsumexp(exact)
            return Bounds(scores, scores)
        cheap = (hidden @ shown.directions.T.astype(np.float64)) @ shown.weight.T + bias  # [b,V]
        surely, maybe = _candidates(cheap, min(max(k, shown.candidates), len(weight)))
        cheap *= gate
        lowest = np.where(surely, exact, np.where(maybe, np.minimum(exact, cheap), cheap))
        highest = np.where(surely, exact, np.where(maybe, np.maximum(exact, cheap), cheap))
        return Bounds(
            np.where(surely, exact - self._logsumexp(highest), -np.inf),
            np.where(maybe, exact - self._logsumexp(lowest), -np.inf),
        )

    def _logsumexp(self, scores: Floats) -> Floats:
        """Over an expert's classes and the absent ones, whose score is 0: [b,1]."""
        absent = self.n_classes - scores.shape[1]
        largest = np.maximum(scores.max(axis=1, keepdims=True, initial=0.0), 0.0)
        total = np.exp(scores - largest).sum(axis=1, keepdims=True) + absent * np.exp(-largest)
        logsumexp: Floats = np.log(total) + largest
        return logsumexp


def _weights_and_biases(layer: DSSoftmax, matrix: torch.Tensor) -> tuple[Floats, Floats]:
    """[V,D] and [V] in double precision; the biases are zeros where the layer has none."""
    weight, bias = layer.split_bias(matrix.detach().double())
    return weight.numpy(), np.zeros(len(weight)) if bias is None else bias.numpy()


def _candidates(cheap: Floats, count: int) -> tuple[Mask, Mask]:
    """The `count` best of [b,V] scores: which are among them surely, and which may be."""
    if count == cheap.shape[1]:
        every = np.ones(cheap.shape, bool)
        return every, every
    ordered = -np.sort(-cheap, axis=1)
    last_in, first_out = ordered[:, count - 1, None], ordered[:, count, None]
    near = NEAR * np.maximum(1.0, np.abs(cheap).max(axis=1, keepdims=True))
    return cheap > first_out + near, cheap >= last_in - near
