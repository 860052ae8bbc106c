"""One loaded version of a model: its facts, its engine and the queue before it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from service import bundle
from service.batcher import Batcher, TopKEngine
from service.bundle import Bundle, Manifest
from service.codecs import DEFAULT_K, Source
from service.metrics import Metrics, ModelMetrics
from service.settings import Settings

EngineFactory = Callable[[Bundle, int], TopKEngine]


@dataclass(frozen=True, eq=False)
class Model:
    name: str
    version: int
    manifest: Manifest
    samples: NDArray[np.float32] | None  # [S,D]
    source: Source
    engine: TopKEngine
    batcher: Batcher
    metrics: ModelMetrics

    @property
    def default_k(self) -> int:
        return min(DEFAULT_K, self.engine.n_reachable)


def open_model(
    name: str,
    version: int,
    path: Path,
    *,
    settings: Settings,
    metrics: Metrics,
    engine_factory: EngineFactory,
) -> Model:
    """Read a bundle and make it answer. The bundle itself is let go: the engine has its graphs."""
    opened = bundle.read(path)
    engine = engine_factory(opened, settings.engine.threads)
    labels = None if opened.labels is None else np.array(opened.labels, dtype=object)
    observer = metrics.model(name, version, opened)
    batcher = Batcher(
        engine,
        name=f"{name}/{version}",
        max_queue_rows=settings.queue.max_rows,
        max_batch_rows=settings.queue.max_batch_rows,
        observer=observer,
        inline_seconds=settings.queue.inline_seconds,
    )
    observer.watch_queue(lambda: batcher.queued_rows)
    return Model(
        name=name,
        version=version,
        manifest=opened.manifest,
        samples=opened.samples,
        source=Source(name, version, labels),
        engine=engine,
        batcher=batcher,
        metrics=observer,
    )
