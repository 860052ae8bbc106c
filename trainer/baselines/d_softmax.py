"""D-softmax: the rarer a class, the fewer numbers its row has.

Classes are sorted by training frequency and cut into three buckets. The first has rows of D
numbers, the second of D/2, the tail of D/4; the shorter rows are multiplied by the first numbers of
one projection of the hidden vector, which begins as its principal directions.

B rows, D hidden, N classes, b classes of a bucket.
"""

import time
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import helper
from torch import Tensor, nn

from trainer.baselines import training
from trainer.baselines.method import Baseline, Dial, FixedCost, Inputs, limit
from trainer.evaluation.onnx_scan import OnnxScan

# Shares of the classes in the first two buckets; the tail has the rest.
SETTINGS = ((0.25, 0.25), (0.1, 0.2), (0.05, 0.1), (0.5, 0.25))
PAPER = {(0.25, 0.25): "D-Softmax"}


class Buckets(nn.Module):
    def __init__(
        self, head: Tensor, hidden: Tensor, order: Tensor, shares: tuple[float, float]
    ) -> None:
        """Begins as the head with its rows projected; `hidden` [M,D] tells the directions."""
        super().__init__()
        n_classes, hidden_size = head.shape
        first, second = (max(1, round(share * n_classes)) for share in shares)
        self.sizes = (first, second, n_classes - first - second)
        self.widths = (hidden_size, max(1, hidden_size // 2), max(1, hidden_size // 4))
        moments = hidden.T @ hidden / len(hidden)  # [D,D]
        directions = torch.linalg.eigh(moments).eigenvectors.flip(1)  # by falling eigenvalue
        basis = directions[:, : self.widths[1]].T.contiguous()
        self.projection = nn.Parameter(basis)  # [D/2,D]
        full, *short = head[order].split(self.sizes)
        self.full = nn.Parameter(full.clone())  # [b,D]
        self.short = nn.ParameterList(
            (rows @ basis[:width].T).contiguous()
            for rows, width in zip(short, self.widths[1:], strict=True)
        )
        self.register_buffer("order", order)  # [N] class of each place
        self.register_buffer("place", torch.argsort(order))  # [N] place of each class

    def rows(self) -> Tensor:
        """The rows [N,D] of the full softmax that this layer is."""
        short = [
            rows @ self.projection[:width]
            for rows, width in zip(self.short, self.widths[1:], strict=True)
        ]
        return torch.cat([self.full, *short])[self.place]


@dataclass
class DSoftmaxSearch(FixedCost):
    scan: OnnxScan
    order: NDArray[np.int64]
    multiply_adds: float

    def topk(self, hidden: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        return self.order[self.scan.topk(hidden, k)]


def multiply_adds(sizes: tuple[int, ...], widths: tuple[int, ...]) -> int:
    """Every row at its own width, and the projection to the second bucket's width."""
    return sum(n * width for n, width in zip(sizes, widths, strict=True)) + widths[1] * widths[0]


def search(layer: Buckets, **seconds: float) -> DSoftmaxSearch:
    tail = layer.widths[2]
    nodes = [
        helper.make_node("Gemm", ["hidden", "W0"], ["logits0"], transB=1),
        helper.make_node("Gemm", ["hidden", "P"], ["projected"], transB=1),
        helper.make_node("Gemm", ["projected", "W1"], ["logits1"], transB=1),
        helper.make_node("Slice", ["projected", "start", "end", "axis"], ["short"]),
        helper.make_node("Gemm", ["short", "W2"], ["logits2"], transB=1),
        helper.make_node("Concat", ["logits0", "logits1", "logits2"], ["logits"], axis=1),
    ]
    constants = {
        "W0": layer.full.detach().numpy(),
        "P": layer.projection.detach().numpy(),
        "W1": layer.short[0].detach().numpy(),
        "W2": layer.short[1].detach().numpy(),
        "start": np.array([0]),
        "end": np.array([tail]),
        "axis": np.array([1]),
    }
    return DSoftmaxSearch(
        OnnxScan(nodes, constants, layer.widths[0]),
        layer.order.numpy(),
        multiply_adds(layer.sizes, layer.widths),
        **seconds,
    )


class DSoftmax(Baseline):
    """The dial is where the buckets are cut."""

    method = "d-softmax"

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self._order = torch.from_numpy(np.argsort(-inputs.frequencies(), kind="stable"))

    def dials(self) -> list[Dial]:
        def cuts(shares: tuple[float, float]) -> list[int]:
            return [round(100 * cut) for cut in accumulate(shares)]

        return [
            Dial(
                {
                    "shares": [*shares, round(1 - sum(shares), 6)],
                    "epochs": self.inputs.options.train_epochs,
                    **limit(self.inputs.options.train_rows),
                    **training.drawn(self.inputs.n_classes),
                },
                "D-softmax, cut at " + " and ".join(f"{cut}%" for cut in cuts(shares)),
                PAPER.get(shares),
            )
            for shares in SETTINGS
        ]

    def facts(self) -> dict[str, Any]:
        options = self.inputs.options
        return {"rows": options.train_rows, "seed": options.seed}

    def build(self, dial: Dial) -> DSoftmaxSearch:
        first, second, _ = dial.settings["shares"]
        head = torch.from_numpy(self.inputs.head.weight)
        started = time.perf_counter()
        layer = Buckets(head, self.inputs.sample()[0], self._order, (first, second))
        build_seconds = time.perf_counter() - started
        train_seconds = training.fit(
            layer,
            training.softmax_loss(layer.rows, self.inputs),
            self.inputs,
            self.inputs.folder(self.method, {**dial.settings, **self.facts()}),
            rounds=1,
            epochs=dial.settings["epochs"],
            n_rows=self.inputs.options.train_rows,
        )
        return search(layer, train_seconds=train_seconds, build_seconds=build_seconds)
