"""Bundles for tests of the page at /: names that try to be markup, and very many experts."""

from pathlib import Path

import numpy as np

from service import bundle

WIDTH = 4
NAMES = (
    '<img src=x onerror="document.title=1">', "café", "", "word 3", "word 4",
    "<b>bold</b>", "word 6", "far away", "word 8", "word 9",
)  # fmt: skip
# The first two experts are nearly as good for it; the second is far surer of its class.
BETWEEN = [1.0, 0.9, 0.0, 1.0]


def write_words(path: Path, *, labels: bool = True, samples: bool = True) -> None:
    """Three experts and ten classes, with names that try to be markup."""
    weight = np.zeros((11, WIDTH), np.float32)
    weight[7, 3] = 20.0  # class 7, in the second expert
    bundle.write(
        path,
        gate=np.eye(3, WIDTH, dtype=np.float32),
        weight=weight,
        offsets=np.array([0, 5, 9, 11]),
        classes=np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 9], np.int32),
        n_classes=10,
        training=bundle.TrainingFacts(
            utilization=[0.5, 0.25, 0.25], flops_speedup=1.5, accuracy=0.875
        ),
        labels=NAMES if labels else None,
        samples=np.array([BETWEEN, [0, 0, 2, 0]], np.float32) if samples else None,
    )


def write_many(path: Path, experts: int) -> None:
    """So many experts, of which every tenth holds twenty classes, and the others none."""
    rng = np.random.default_rng(0)
    sizes = np.where(np.arange(experts) % 10 == 9, 20, 0)
    n_classes = int(sizes.sum())
    bundle.write(
        path,
        gate=rng.normal(size=(experts, WIDTH)).astype(np.float32),
        weight=rng.normal(size=(n_classes, WIDTH)).astype(np.float32),
        offsets=np.cumsum([0, *sizes]),
        classes=np.arange(n_classes, dtype=np.int32),
        n_classes=n_classes,
        training=bundle.TrainingFacts(utilization=[1 / experts] * experts, flops_speedup=2.0),
    )
