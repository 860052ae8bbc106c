"""The bundles that scenarios serve: random numbers, since only shapes cost time."""

from collections.abc import Iterable
from pathlib import Path

from benchmarks.engines.random_bundles import Shape, write_random
from service.bundle import Bundle

SMALL = Shape(n_classes=1000, n_experts=8, held=200, hidden_size=32)


def write(models: Path, versions: Iterable[int], shape: Shape = SMALL) -> dict[int, Bundle]:
    """Versions of model `m`, each with numbers of its own."""
    return {
        version: write_random(models / "m" / str(version), shape, seed=1000 * version)
        for version in versions
    }
