"""A bundle that is large enough for its memory to show."""

from pathlib import Path

import numpy as np

from service import bundle

WIDTH, CLASSES = 256, 8192  # 8 MiB


def write_wide(
    path: Path,
    seed: int,
    width: int = WIDTH,
    classes: int = CLASSES,
    weight: float | None = None,
) -> Path:
    """One expert that holds all classes."""
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=(classes, width)).astype(np.float32)
    bundle.write(
        path,
        gate=np.ones((1, width), np.float32),
        weight=numbers if weight is None else np.full_like(numbers, weight),
        offsets=np.array([0, classes]),
        classes=np.arange(classes, dtype=np.int32),
        n_classes=classes,
        training=bundle.TrainingFacts(utilization=[1.0], flops_speedup=1.0),
    )
    return path
