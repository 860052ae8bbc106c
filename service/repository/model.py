"""One loaded version of a model: its manifest, its engine and the batcher in front of it."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from service import bundle
from service.batching.batcher import Batcher
from service.batching.queue import QueueLimits
from service.batching.threads import EngineThreads
from service.bundle import Bundle, Manifest, snapshots
from service.bundle.labels import json_bytes_most
from service.bundle.manifest import read_manifest
from service.bundle.snapshots import Snapshot
from service.errors import AnswersNotFinite
from service.repository.class_index import ClassIndex
from service.repository.load_memory import load_bytes
from service.repository.room import UNCHECKED, Room
from service.settings import Settings
from service.telemetry.metrics import shadow
from service.telemetry.metrics.model import ModelMetrics
from service.telemetry.metrics.registry import Metrics
from service.telemetry.metrics.shadow import Shadow
from service.topk import TopKEngine

logger = logging.getLogger(__name__)

DEFAULT_K = 10

EngineFactory = Callable[[Bundle, int | None], TopKEngine]


@dataclass(frozen=True)
class Source:
    """Which model answers, and its labels by class id."""

    model: str
    version: int
    labels: NDArray[np.object_] | None  # [C]
    label_bytes_most: int = 0  # of the longest label as a JSON string, quotation marks included


@dataclass(frozen=True, eq=False)
class Model:
    name: str
    version: int
    manifest: Manifest
    samples: NDArray[np.float32] | None  # [S,D]
    index: ClassIndex
    source: Source
    engine: TopKEngine
    batcher: Batcher
    metrics: ModelMetrics
    shadow: Shadow | None

    async def close(self) -> None:
        """Answer the requests that were accepted, then stop."""
        await self.batcher.close()
        if self.shadow is not None:
            await asyncio.to_thread(self.shadow.close)

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
    threads: EngineThreads,
    snapshot: Snapshot = snapshots.private_copy,
    room: Room = UNCHECKED,
) -> Model:
    """Read a bundle if there is memory for it, build its engine and warm it up. The engine keeps
    what it needs of it."""
    manifest = read_manifest(path)
    exact = settings.repository.load_heads and manifest.rows_folder is not None
    head = exact or settings.shadow.rate > 0
    needed = load_bytes(manifest, settings.engine.backend, head=head)
    with room.admitted(manifest.checksum, needed):
        opened = bundle.read(path, snapshot, head=head, manifest=manifest)
        return _open(name, version, opened, settings, metrics, engine_factory, threads)


def _open(
    name: str,
    version: int,
    opened: Bundle,
    settings: Settings,
    metrics: Metrics,
    engine_factory: EngineFactory,
    threads: EngineThreads,
) -> Model:
    rate = settings.shadow.rate
    engine = engine_factory(opened, settings.engine.threads)
    known = _known_rows(opened)
    _check_answers(engine, known)
    labels = None if opened.labels is None else np.array(opened.labels, dtype=object)
    shadowed = opened.head is not None and rate > 0
    observer = metrics.model(
        name,
        version,
        opened,
        window_seconds=settings.drift.window_seconds,
        shadow_size=shadow.size(engine) if shadowed else 0,
        own_series=settings.metrics.own_series,
    )
    compared = None
    if opened.head is not None and rate > 0:
        full = engine_factory(opened.head, 1)
        most_rows = settings.shadow.max_waiting_rows
        compared = Shadow(engine, full, observer.shadow, rate=rate, most_rows=most_rows)
    elif rate > 0:
        logger.warning("%s/%d ships no head, so no row of it is compared with one.", name, version)
    queue = settings.queue
    batcher = Batcher(
        engine,
        name=f"{name}/{version}",
        observer=observer,
        threads=threads,
        limits=QueueLimits(
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
        sampler=None if compared is None else compared.offer,
    )
    observer.watch_queue(lambda: batcher.queued_rows)
    model = Model(
        name=name,
        version=version,
        manifest=opened.manifest,
        samples=opened.samples,
        index=ClassIndex(opened.manifest.n_classes, opened.offsets, opened.classes),
        source=Source(name, version, labels, json_bytes_most(opened.labels or ())),
        engine=engine,
        batcher=batcher,
        metrics=observer,
        shadow=compared,
    )
    batcher.warm(known, model.default_k)
    return model


def _known_rows(opened: Bundle) -> NDArray[np.float32]:
    """Query rows to try a bundle with: its samples, or zeros."""
    samples = opened.samples
    if samples is not None:
        samples = samples[np.isfinite(samples).all(axis=1)]
    if samples is None or not len(samples):
        return np.zeros((1, opened.manifest.hidden_size), np.float32)
    return samples


def _check_answers(engine: TopKEngine, known: NDArray[np.float32]) -> None:
    """Refuse a bundle whose checksums are right but whose answers are not finite."""
    answers = engine.topk(known[:1], min(DEFAULT_K, engine.n_reachable))
    if not np.isfinite(answers.log_probs).all():
        raise AnswersNotFinite("The bundle answers a row with NaN or infinity.")
