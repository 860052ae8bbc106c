"""Bundles of random numbers: the time of an answer depends on shapes only.

K experts, V classes of each, N classes, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from service import bundle
from service.bundle import Bundle, Precision


@dataclass(frozen=True)
class Shape:
    n_classes: int
    n_experts: int
    held: int  # classes in each expert
    hidden_size: int

    @property
    def flops_speedup(self) -> float:
        return self.n_classes / (self.held + self.n_experts)


def write_random(
    path: Path,
    shape: Shape,
    *,
    precision: Precision = "fp32",
    labels: Sequence[str] | None = None,
    seed: int = 0,
) -> Bundle:
    """Every expert holds as many classes, and gets as many rows of `random_rows`."""
    rng = np.random.default_rng(seed)
    rows = shape.n_experts * shape.held
    scale = np.float32(shape.hidden_size**-0.5)
    classes = [
        np.sort(rng.choice(shape.n_classes, shape.held, replace=False))
        for _ in range(shape.n_experts)
    ]
    return bundle.write(
        path,
        gate=random_rows(shape.n_experts, shape.hidden_size, seed + 1) * scale * 4,
        weight=random_rows(rows, shape.hidden_size, seed + 2) * scale,
        offsets=np.arange(shape.n_experts + 1) * shape.held,
        classes=np.concatenate(classes).astype(np.int32),
        n_classes=shape.n_classes,
        training=bundle.TrainingFacts(
            utilization=[1 / shape.n_experts] * shape.n_experts, flops_speedup=shape.flops_speedup
        ),
        labels=labels,
        precision=precision,
    )


def random_rows(rows: int, hidden_size: int, seed: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, hidden_size), np.float32)
