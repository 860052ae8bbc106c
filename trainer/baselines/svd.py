"""SVD-softmax: preview all classes in a few dimensions, score the most promising ones in full.

W = U S V^T. A hidden vector is rotated by V^T once; the first `window` columns of U S then give a
preview of every logit, and the best `share` of the classes are scored with all columns.

B rows, D hidden, N classes, C candidates, w window.
"""

import time
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from trainer.baselines.method import Baseline, Dial, FixedCost, Inputs, best_of

WINDOWS = (16, 32, 64)
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1)
PAPER = {(16, 0.1): "SVD-10", (16, 0.5): "SVD-50"}


@dataclass(frozen=True)
class Rotated:
    rotation: NDArray[np.float32]  # V [D,D]
    weight: NDArray[np.float32]  # U S [N,D], columns by falling importance
    seconds: float


@dataclass
class SVDSoftmax(FixedCost):
    rotated: Rotated
    preview: NDArray[np.float32]  # [N,w]
    n_candidates: int

    @property
    def multiply_adds(self) -> float:
        """The rotation, the preview, and the candidates in full, as the paper counts them."""
        n_classes, hidden_size = self.rotated.weight.shape
        rotation = hidden_size * hidden_size
        return rotation + n_classes * self.preview.shape[1] + self.n_candidates * hidden_size

    def topk(self, hidden: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        n_classes, window = self.preview.shape
        turned = hidden @ self.rotated.rotation  # [B,D]
        previewed = turned[:, :window] @ self.preview.T  # [B,N]
        if self.n_candidates < n_classes:
            first = n_classes - self.n_candidates
            candidates = np.argpartition(previewed, first, axis=1)[:, first:]  # [B,C]
        else:
            candidates = np.broadcast_to(np.arange(n_classes), previewed.shape)
        if len(turned) == 1:
            scores = turned @ self.rotated.weight[candidates[0]].T  # [1,C]
        else:  # for many rows, scoring all classes is quicker than gathering candidates
            scores = np.take_along_axis(turned @ self.rotated.weight.T, candidates, axis=1)
        return best_of(scores, candidates, k)


class SVD(Baseline):
    method = "svd"

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self._preview = cache(self._first_columns)

    def dials(self) -> list[Dial]:
        swept = [(window, share) for window in WINDOWS for share in SHARES]
        swept += [pair for pair in PAPER if pair not in swept]
        return [
            Dial(
                {"window": window, "share": share},
                f"SVD w={window} {100 * share:g}%",
                PAPER.get((window, share)),
            )
            for window, share in swept
            if window <= self.inputs.hidden_size
        ]

    def _first_columns(self, window: int) -> NDArray[np.float32]:
        return np.ascontiguousarray(self.rotated.weight[:, :window])

    @cached_property
    def rotated(self) -> Rotated:
        started = time.perf_counter()
        left, values, right = np.linalg.svd(self.inputs.head.weight, full_matrices=False)
        rank, hidden_size = right.shape
        weight = np.zeros((len(left), hidden_size), np.float32)
        weight[:, :rank] = left * values
        rotation = np.zeros((hidden_size, hidden_size), np.float32)
        rotation[:, :rank] = right.T
        return Rotated(rotation, weight, time.perf_counter() - started)

    def build(self, dial: Dial) -> SVDSoftmax:
        window, share = dial.settings["window"], dial.settings["share"]
        n_candidates = min(self.inputs.n_classes, max(10, round(share * self.inputs.n_classes)))
        seconds = self.rotated.seconds
        return SVDSoftmax(self.rotated, self._preview(window), n_candidates, build_seconds=seconds)
