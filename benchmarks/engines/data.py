"""What is compared on: query rows with their labels and head, and bundles that answer them.

M query rows, D hidden.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.engines.byte_floor import ByteFloor
from benchmarks.engines.contestants import K
from benchmarks.engines.timing import Rows
from service import bundle as bundles
from service.bundle import Bundle
from service.bundle.manifest import RECALL_AT
from service.engine import Engine
from trainer.baselines.measurement import spread
from trainer.data.arrays import Head, open_head, open_vectors
from trainer.evaluation.full_scan import full_topk


@dataclass(frozen=True)
class Data:
    hidden: Rows  # [M,D]
    labels: NDArray[np.int64]  # [M]
    head: Head
    best: NDArray[np.int64]  # [M,10] the full softmax's own answers


@dataclass(frozen=True)
class Served:
    """A bundle with its query rows, the experts that answer them, and their byte floor."""

    name: str
    bundle: Bundle
    hidden: Rows  # [M,D]
    experts: NDArray[np.int64]  # [M] that the gate chooses
    floor: ByteFloor

    @property
    def flops_speedup(self) -> float:
        manifest = self.bundle.manifest
        counts = np.bincount(self.experts, minlength=manifest.n_experts)
        shares = (counts / len(self.experts)).tolist()
        return bundles.flops_speedup(manifest.n_classes, self.bundle.expert_costs, shares)

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "precision": self.bundle.manifest.precision,
            "flops_speedup": round(self.flops_speedup, 2),
        }


def read_data(hidden: Path, labels: Path, head: Path, rows: int) -> Data:
    full = open_head(head)
    n_classes, hidden_size = full.weight.shape
    vectors = open_vectors(hidden, labels, n_classes=n_classes, hidden_size=hidden_size)
    places = spread(len(vectors.labels), rows)
    chosen = np.ascontiguousarray(vectors.hidden[places], np.float32)
    wanted = vectors.labels[places].astype(np.int64)
    return Data(chosen, wanted, full, full_topk(chosen, full, RECALL_AT[-1]))


def served(name: str, bundle: Bundle, hidden: Rows) -> Served:
    experts = Engine(bundle).topk(hidden, K).experts
    return Served(name, bundle, hidden, experts, ByteFloor.of(bundle))
