"""The full softmax itself, in float32 and in int8. N classes, D hidden."""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.baselines.method import Baseline, Dial, FixedCost
from trainer.evaluation import onnx_scan
from trainer.evaluation.onnx_scan import OnnxScan


@dataclass
class Scan(FixedCost):
    scan: OnnxScan
    multiply_adds: float

    def topk(self, hidden: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        return self.scan.topk(hidden, k)


class Full(Baseline):
    """Exact: every class is scored."""

    method = "full"

    def dials(self) -> list[Dial]:
        return [Dial({}, "full softmax")]

    def build(self, dial: Dial) -> Scan:  # noqa: ARG002
        started = time.perf_counter()
        head = self.inputs.head
        scan = onnx_scan.full(head)
        return Scan(scan, head.weight.size, build_seconds=time.perf_counter() - started)


class FullInt8(Baseline):
    """As many multiply-adds, but of bytes."""

    method = "full-int8"

    def dials(self) -> list[Dial]:
        return [Dial({}, "full softmax, int8")]

    def build(self, dial: Dial) -> Scan:  # noqa: ARG002
        started = time.perf_counter()
        weight = self.inputs.head.weight
        hidden, _ = self.inputs.sample()
        scan = onnx_scan.int8(weight, float(hidden.abs().max()))
        return Scan(scan, weight.size, build_seconds=time.perf_counter() - started)
