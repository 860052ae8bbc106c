"""Sweeps an engine in process: one point for each batch, k, experts, threads and backend.

Every engine has a fresh process, so that its memory is its own.
"""

import gc
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import cycle, product
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service import bundle
from service.bench import proc_stats, rows
from service.bundle.manifest import read_manifest
from service.engine import BackendName, Engine

WARM_UP_SHARE = 0.2
LEAST_CALLS = 10


@dataclass(frozen=True)
class Sweep:
    bundle: Path
    hidden: Path | None
    batches: Sequence[int]
    ks: Sequence[int]
    experts: Sequence[int]
    threads: Sequence[int]
    backends: Sequence[BackendName]
    seconds: float  # of each point


@dataclass(frozen=True)
class Measured:
    rows: str
    bundle_bytes: int
    points: list[dict[str, Any]]


def sweep(plan: Sweep) -> Iterator[Measured]:
    """The points of one engine after the other."""
    for backend, threads in product(plan.backends, plan.threads):
        # Ctrl-C reaches it as well, and ends it without a word: this process says what happened.
        dies_quietly = (signal.SIGINT, signal.SIG_DFL)
        with ProcessPoolExecutor(1, get_context("spawn"), signal.signal, dies_quietly) as process:
            yield process.submit(measure_engine, plan, backend, threads).result()


def measure_engine(plan: Sweep, backend: BackendName, threads: int) -> Measured:
    _import_backends()
    manifest = read_manifest(plan.bundle)
    source = rows.choose(plan.hidden, rows.samples(plan.bundle), manifest.hidden_size)
    batches = {size: source.batches(size) for size in plan.batches}
    before = proc_stats.resident_bytes([os.getpid()])
    started = perf_counter()
    engine = Engine(bundle.read(plan.bundle), threads, backend)
    load_seconds = perf_counter() - started
    for k, experts in product(plan.ks, plan.experts):
        engine.check(batches[max(batches)][0], k, experts)
    for hidden in batches[max(batches)]:  # what is only mapped comes into memory when it is used
        engine.topk(hidden, min(plan.ks), min(plan.experts))
    after = proc_stats.resident_bytes([os.getpid()])
    resident = None if before is None or after is None else after - before
    points = []
    for k, experts, batch in product(plan.ks, plan.experts, plan.batches):
        point: dict[str, Any] = {
            "batch": batch,
            "k": k,
            "experts": experts,
            "threads": threads,
            "backend": backend,
        }
        point |= measure(engine, batches[batch], k, experts, plan.seconds)
        points.append(point | {"resident_bytes": resident, "load_seconds": load_seconds})
    bundle_bytes = sum(entry.bytes for entry in manifest.files.values())
    return Measured(source.source, bundle_bytes, points)


def _import_backends() -> None:
    """What a server has in memory without any model is not the bundle's."""
    import service.engine.compiled
    import service.engine.onnx_sessions  # noqa: F401


def measure(
    engine: Engine, batches: list[NDArray[np.float32]], k: int, experts: int, seconds: float
) -> dict[str, float]:
    """How long calls take, and where the time goes."""
    batch = len(batches[0])
    _calls(engine, batches, k, experts, seconds * WARM_UP_SHARE)
    gc.collect()
    cpu, wall = process_time(), perf_counter()
    times, gate_seconds, expert_seconds = _calls(engine, batches, k, experts, seconds)
    cpu, wall = process_time() - cpu, perf_counter() - wall
    p50, p90, p99 = np.percentile(times, (50, 90, 99)) * 1e6
    total = float(times.sum())
    gate, expert = gate_seconds / total, expert_seconds / total
    return {
        "calls": len(times),
        "p50_us": float(p50),
        "p90_us": float(p90),
        "p99_us": float(p99),
        "mean_us": total / len(times) * 1e6,
        "us_per_row": float(p50) / batch,
        "rows_per_second": batch * len(times) / total,
        "cpu_per_second": cpu / wall,
        "gate_share": gate,
        "expert_share": expert,  # of several threads together, so it may be more than 1
        "rest_share": max(0.0, 1 - gate - expert),
    }


def _calls(
    engine: Engine, batches: list[NDArray[np.float32]], k: int, experts: int, seconds: float
) -> tuple[NDArray[np.float64], float, float]:
    """The time of each call, and what gate and experts say they took of all."""
    times: list[float] = []
    gate_seconds = expert_seconds = 0.0
    until = perf_counter() + seconds
    for hidden in cycle(batches):
        started = perf_counter()
        answer = engine.topk(hidden, k, experts)
        ended = perf_counter()
        times.append(ended - started)
        gate_seconds += answer.gate_seconds
        expert_seconds += float(answer.expert_seconds.sum())
        if ended > until and len(times) >= LEAST_CALLS:
            break
    return np.array(times), gate_seconds, expert_seconds
