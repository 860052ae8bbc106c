"""Sweeps a server over HTTP: one point for each batch and concurrency.

A point is measured in three windows. If their throughput or median latency is more than a tenth
from the mean, it is measured anew, and in the end called unstable.

R requests, W windows.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service import npy
from service.bench import load, proc_stats
from service.bench.load import Load, NotReachable, Plan
from service.bench.rows import Rows, choose
from service.bench.target import Model, Server, ServerNotReachable
from service.errors import DSSError
from service.system.cpu_quota import usable_cpus

WINDOWS = 3
TOLERANCE = 0.1
CONNECT_SECONDS = 0.1
MOST_REQUESTS = 256
MOST_REQUEST_BYTES = 2**22
MEDIA_TYPES = {"npy": "application/x-npy", "json": "application/json"}
BUSY = 0.9  # of a core: the generator may have been the limit
FULL = 0.95  # of all cores: server and generator may have been each other's


class NothingAnswered(DSSError):
    """Not one request was answered with status 200."""


class TooFewConnections(DSSError):
    pass


@dataclass(frozen=True)
class Sweep:
    hidden: Path | None
    batches: Sequence[int]
    concurrencies: Sequence[int]
    k: int
    experts: int
    format: str
    seconds: float  # of each point
    attempts: int
    generators: int


@dataclass(frozen=True)
class Measured:
    rows: str
    points: Iterator[dict[str, Any]]


def sweep(
    plan: Sweep, server: Server, model: Model, samples: NDArray[np.float32] | None
) -> Measured:
    if min(plan.concurrencies) < plan.generators:
        raise TooFewConnections(
            f"{plan.generators} generators need a concurrency of at least {plan.generators}."
        )
    rows = choose(plan.hidden, samples, model.hidden_size)
    return Measured(rows.source, _points(plan, server, model, rows))


@dataclass(frozen=True)
class Target:
    server: Server
    model: Model
    pids: list[int]  # none if its processes cannot be seen
    generators: ProcessPoolExecutor


def _points(plan: Sweep, server: Server, model: Model, rows: Rows) -> Iterator[dict[str, Any]]:
    pids = proc_stats.serving(server.port) if server.is_local else []
    with ProcessPoolExecutor(plan.generators, get_context("spawn")) as generators:
        list(generators.map(abs, range(plan.generators)))  # the first load waits for no process
        target = Target(server, model, pids, generators)
        for batch in plan.batches:
            requests = _requests(plan, server, model, rows, batch)
            for concurrency in plan.concurrencies:
                attempts = 0
                stable = False
                while not stable and attempts < plan.attempts:
                    point = _measure(plan, target, requests, batch, concurrency)
                    attempts += 1
                    stable = point["stable"]
                yield point | {"attempts": attempts}


def _requests(plan: Sweep, server: Server, model: Model, rows: Rows, batch: int) -> list[bytes]:
    media_type = MEDIA_TYPES[plan.format]
    most = MOST_REQUEST_BYTES // (batch * model.hidden_size * 4)
    requests = []
    for hidden in rows.batches(batch, max(2, min(most, MOST_REQUESTS))):
        path = server.base + model.path
        if plan.format == "npy":
            path += f"?k={plan.k}&experts={plan.experts}"
            body = npy.write(hidden)
        else:
            fields = {"inputs": hidden.tolist(), "k": plan.k, "experts": plan.experts}
            body = json.dumps(fields, separators=(",", ":")).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {server.host}:{server.port}\r\n"
            f"Content-Type: {media_type}\r\nAccept: {media_type}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        requests.append(head.encode() + body)
    return requests


def _measure(
    plan: Sweep, target: Target, requests: list[bytes], batch: int, concurrency: int
) -> dict[str, Any]:
    server, model, pids = target.server, target.model, target.pids
    # Metrics are read while the server is idle: reading them takes it longer than many answers.
    counted = server.counters(model.name)
    window = plan.seconds / WINDOWS
    starts = monotonic() + CONNECT_SECONDS + window  # a window's length of warm-up
    ends = starts + plan.seconds
    running = [
        target.generators.submit(
            load.generate, Plan(server.host, server.port, share, turned, starts, ends)
        )
        for share, turned in zip(
            _shares(concurrency, plan.generators), _turned(requests, plan.generators), strict=True
        )
    ]
    sleep(max(0.0, starts - monotonic()))
    cpu_before = proc_stats.cpu_seconds(pids)
    sleep(max(0.0, ends - monotonic()))
    cpu_after = proc_stats.cpu_seconds(pids)
    resident = proc_stats.resident_bytes(pids)
    try:
        loads = [generator.result() for generator in running]
    except NotReachable as error:
        raise ServerNotReachable(str(error)) from error

    seen = _in_windows(loads, starts, window)
    errors = sum(one.errors for one in loads)
    first_error = next((one.first_error for one in loads if one.first_error), None)
    if not all(len(one) for one in seen):
        raise NothingAnswered(
            f"A window of {window:.2g} s saw no answer at batch {batch} and concurrency"
            f" {concurrency}: {(first_error or 'the server is too slow for it').rstrip('.')}."
        )
    server_cpu = None
    if cpu_before is not None and cpu_after is not None:
        server_cpu = (cpu_after - cpu_before) / plan.seconds
    generator_cpus = [one.cpu_seconds / plan.seconds for one in loads]
    return {
        "batch": batch,
        "concurrency": concurrency,
        **_latencies(seen, plan.seconds, batch),
        "errors": errors,
        "first_error": first_error,
        **_server_side(counted, server.counters(model.name), loads),
        "server_cpu_per_second": server_cpu,
        "server_resident_bytes": resident,
        "generator_cpu_per_second": sum(generator_cpus),
        "stable": _agree(seen),
        "notes": _notes(server_cpu, generator_cpus),
    }


def _shares(concurrency: int, generators: int) -> list[int]:
    """Connections of each generator."""
    return [len(range(first, concurrency, generators)) for first in range(generators)]


def _turned(requests: list[bytes], generators: int) -> list[list[bytes]]:
    """The same requests for each generator, begun elsewhere."""
    steps = [len(requests) * generator // generators for generator in range(generators)]
    return [requests[step:] + requests[:step] for step in steps]


def _in_windows(loads: list[Load], starts: float, window: float) -> list[NDArray[np.float64]]:
    """Seconds of the answers that came in each window: W times [R]."""
    finished = np.concatenate([np.array(one.finished) for one in loads])  # [R]
    seconds = np.concatenate([np.array(one.seconds) for one in loads])  # [R]
    which = np.floor((finished - starts) / window)  # [R]
    return [seconds[which == number] for number in range(WINDOWS)]


def _latencies(
    seen: list[NDArray[np.float64]], seconds: float, batch: int
) -> dict[str, float | list[float]]:
    latencies = np.concatenate(seen)
    p50, p90, p99 = (np.percentile(latencies, (50, 90, 99)) * 1e6).tolist()
    return {
        "requests": len(latencies),
        "requests_per_second": len(latencies) / seconds,
        "rows_per_second": batch * len(latencies) / seconds,
        "p50_us": p50,
        "p90_us": p90,
        "p99_us": p99,
        "mean_us": float(latencies.mean()) * 1e6,
        "window_requests_per_second": [len(one) * WINDOWS / seconds for one in seen],
    }


def _agree(seen: list[NDArray[np.float64]]) -> bool:
    for figures in ([len(one) for one in seen], [np.median(one) for one in seen]):
        mean = np.mean(figures)
        if np.abs(np.array(figures) - mean).max() > TOLERANCE * mean:
            return False
    return True


def _server_side(
    before: dict[str, float], after: dict[str, float], loads: list[Load]
) -> dict[str, float | None]:
    """What the server says of itself; nothing if it counted other requests than these."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    answered = sum(len(one.finished) for one in loads)
    alone = grown("dss_requests_total") == answered

    def ratio(total: str, number: str) -> float | None:
        return grown(total) / grown(number) if alone and grown(number) else None

    def microseconds(name: str) -> float | None:
        mean = ratio(f"{name}_sum", f"{name}_count")
        return None if mean is None else mean * 1e6

    return {
        "joined_rows": ratio("dss_rows_total", "dss_executions_total"),
        "queue_us": microseconds("dss_queue_seconds"),
        "compute_us": microseconds("dss_compute_seconds"),
    }


def _notes(server_cpu: float | None, generator_cpus: list[float]) -> list[str]:
    notes = []
    if max(generator_cpus) > BUSY:
        notes.append("the load generator was the limit: try --generators 2")
    elif server_cpu is not None and server_cpu + sum(generator_cpus) > FULL * usable_cpus():
        notes.append("server and load generator filled all cores")
    return notes
