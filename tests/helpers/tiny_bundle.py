"""A tiny bundle whose gate one can foresee."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from service import bundle
from service.bundle.manifest import GateFacts

WIDTH = 4
N_CLASSES = 12
SIZES = (5, 4, 4)


def write_tiny(
    path: Path,
    *,
    seed: int = 0,
    labels: bool = True,
    gates: GateFacts | None = None,
    head: NDArray[np.float32] | None = None,
    head_bias: NDArray[np.float32] | None = None,
    precision: bundle.Precision = "fp32",
) -> bundle.Bundle:
    """Three experts, twelve classes, class 0 twice; a row's largest axis chooses its expert."""
    rng = np.random.default_rng(seed)
    gate = np.zeros((3, WIDTH), np.float32)
    gate[[0, 1, 2], [0, 1, 2]] = 4.0
    classes = np.concatenate([np.arange(0, 5), np.arange(5, 9), [0, 9, 10, 11]]).astype(np.int32)
    return bundle.write(
        path,
        gate=gate,
        weight=rng.normal(size=(len(classes), WIDTH)).astype(np.float32),
        offsets=np.cumsum([0, *SIZES]),
        classes=classes,
        n_classes=N_CLASSES,
        training=bundle.TrainingFacts(
            utilization=[0.5, 0.25, 0.25],
            flops_speedup=bundle.flops_speedup(N_CLASSES, SIZES, [0.5, 0.25, 0.25]),
            accuracy=0.9,
            gates=gates,
            head_recall=None if head is None else {"1": 0.75, "5": 0.5, "10": 0.5},
        ),
        labels=[f"class {number}" for number in range(N_CLASSES)] if labels else None,
        samples=rng.normal(size=(2, WIDTH)).astype(np.float32),
        head=head,
        head_bias=head_bias,
        precision=precision,
    )


def rows_for(*experts: int) -> NDArray[np.float32]:
    """One row for each expert named, chosen by the gate."""
    rows = np.full((len(experts), WIDTH), 0.25, np.float32)
    rows[np.arange(len(experts)), list(experts)] = 1.0
    return rows


def with_classes(
    made: bundle.Bundle, changed: Callable[[NDArray[np.int32]], NDArray[np.int32]]
) -> bundle.Bundle:
    """A bundle whose experts name other classes for the same rows."""
    parts = [changed(made.expert_classes(expert)) for expert in range(made.manifest.n_experts)]
    return replace(made, classes=np.concatenate(parts))
