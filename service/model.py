"""One loaded version of a model: its facts, its engine and the queue before it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from service import bundle, snapshots
from service.batcher import Batcher
from service.bundle import Bundle, Manifest
from service.calls import TopKEngine
from service.codecs import DEFAULT_K, Source
from service.errors import AnswersNotFinite
from service.metrics import Metrics, ModelMetrics
from service.settings import Settings
from service.snapshots import Snapshot
from service.waiting import Bounds

EngineFactory = Callable[[Bundle, int | None], TopKEngine]


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
    snapshot: Snapshot = snapshots.private,
) -> Model:
    """Read a bundle and make it answer. The bundle itself is let go: the engine has its graphs."""
    opened = bundle.read(path, snapshot)
    engine = engine_factory(opened, settings.engine.threads)
    known = _known_rows(opened)
    _check_answers(engine, known)
    labels = None if opened.labels is None else np.array(opened.labels, dtype=object)
    observer = metrics.model(name, version, opened)
    queue = settings.queue
    batcher = Batcher(
        engine,
        name=f"{name}/{version}",
        observer=observer,
        bounds=Bounds(
            queue.max_rows,
            queue.max_bytes,
            queue.max_seconds,
            lasting_seconds=queue.max_batch_seconds,
            burst_seconds=queue.max_burst_seconds,
        ),
        max_batch_rows=queue.max_batch_rows,
        max_batch_seconds=queue.max_batch_seconds,
        inline_seconds=queue.inline_seconds,
        stuck_seconds=settings.engine.stuck_seconds,
    )
    observer.watch_queue(lambda: batcher.queued_rows)
    model = Model(
        name=name,
        version=version,
        manifest=opened.manifest,
        samples=opened.samples,
        source=Source(name, version, labels),
        engine=engine,
        batcher=batcher,
        metrics=observer,
    )
    batcher.warm(known, model.default_k)
    return model


def _known_rows(opened: Bundle) -> NDArray[np.float32]:
    """Rows to try a bundle with: its samples, or zeros."""
    samples = opened.samples
    if samples is not None:
        samples = samples[np.isfinite(samples).all(axis=1)]
    if samples is None or not len(samples):
        return np.zeros((1, opened.manifest.hidden_size), np.float32)
    return samples


def _check_answers(engine: TopKEngine, known: NDArray[np.float32]) -> None:
    """Checksums say that a bundle is as it was written, not that it was written well."""
    answers = engine.topk(known[:1], min(DEFAULT_K, engine.n_reachable))
    if not np.isfinite(answers.log_probs).all():
        raise AnswersNotFinite("The bundle answers a row with NaN or infinity.")
