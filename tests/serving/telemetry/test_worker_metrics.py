"""Metrics of several workers, which each of them shows."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from helpers.fake_engine import result_of
from prometheus_client import CollectorRegistry, ProcessCollector

from service.bundle import Bundle
from service.shared_state import worker_table
from service.shared_state.counters import SharedCounters
from service.shared_state.worker_table import WorkerTable
from service.telemetry.metrics import model as model_metrics
from service.telemetry.metrics.model import ModelMetrics
from service.telemetry.metrics.process import Processes
from service.telemetry.metrics.registry import Metrics

TINY = {"model": "tiny", "version": "1"}


@dataclass
class Worker:
    registry: CollectorRegistry
    metrics: Metrics
    model: ModelMetrics

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@pytest.fixture
def start(tmp_path: Path, tiny: Bundle) -> Callable[[int], Worker]:
    """A worker's metrics as they are made in its process."""

    def start_one(number: int) -> Worker:
        registry = CollectorRegistry()
        metrics = Metrics(
            registry, SharedCounters(tmp_path, number), partial(worker_table.read, tmp_path)
        )
        return Worker(registry, metrics, metrics.model("tiny", 1, tiny))

    WorkerTable({0: 10, 1: 11}).write(tmp_path)
    return start_one


def test_every_worker_shows_the_totals_of_all(start: Callable[[int], Worker]) -> None:
    workers = [start(0), start(1)]
    for number, worker in enumerate(workers):
        worker.model.executed([0.0], 3, 0.001, result_of(0.0, [number + 1, 0, 1], [0.5, 0.0, 0.25]))
        worker.metrics.http.answered("/topk", "POST", 200, 0.01)
        worker.metrics.rejected("tiny", "queue-full")
    for worker in workers:
        assert worker.value("dss_rows_total", **TINY) == 6
        assert worker.value("dss_compute_seconds_count", **TINY) == 2
        answered = {"route": "/topk", "method": "POST", "status": "200"}
        assert worker.value("dss_http_requests_total", **answered) == 2
        assert worker.value("dss_http_request_seconds_sum", route="/topk") == pytest.approx(0.02)
        rejected = {"model": "tiny", "reason": "queue-full"}
        assert worker.value("dss_rejected_requests_total", **rejected) == 2
        assert worker.value("dss_expert_utilization_ratio", **TINY, expert="0") == 0.5
        assert worker.model.expert_rows == [3, 0, 2]
        assert worker.model.expert_mean_seconds == [0.5, None, 0.25]


def test_the_next_worker_of_a_number_goes_on_from_the_dead_ones_counts(
    start: Callable[[int], Worker],
) -> None:
    dead, other = start(0), start(1)
    dead.model.executed([0.0], 5, 0.001, result_of(0.0, [5, 0, 0], [0.5, 0.0, 0.0]))
    assert other.value("dss_rows_total", **TINY) == 5
    successor = start(0)
    successor.model.executed([0.0], 2, 0.001, result_of(0.0, [2, 0, 0], [0.5, 0.0, 0.0]))
    assert other.value("dss_rows_total", **TINY) == successor.value("dss_rows_total", **TINY) == 7


def test_queues_are_those_of_live_workers(start: Callable[[int], Worker], tmp_path: Path) -> None:
    one, other = start(0), start(1)
    one.model.watch_queue(lambda: 3)
    other.model.watch_queue(lambda: 4)
    other.metrics.publish_queues()
    assert one.value("dss_queue_rows", **TINY) == 7
    WorkerTable({0: 10}, restarts=0).write(tmp_path)
    assert one.value("dss_queue_rows", **TINY) == 3


def test_the_worker_table_is_shown(start: Callable[[int], Worker], tmp_path: Path) -> None:
    worker = start(0)
    assert (worker.value("dss_workers"), worker.value("dss_worker_restarts_total")) == (2, 0)
    WorkerTable({0: 10}, restarts=4).write(tmp_path)
    assert (worker.value("dss_workers"), worker.value("dss_worker_restarts_total")) == (1, 4)


def test_loaded_workers_stay_counted_when_they_are_replaced(start: Callable[[int], Worker]) -> None:
    one, other = start(0), start(1)
    assert one.metrics.loaded_workers == 0
    other.metrics.loaded()
    assert one.metrics.loaded_workers == 1
    start(1)
    one.metrics.loaded()
    assert one.metrics.loaded_workers == 2


def test_processes_are_summed(tmp_path: Path) -> None:
    """Of two processes that are one: this one, by two numbers."""
    registry = CollectorRegistry()
    here = os.getpid()
    WorkerTable({0: here, 1: here}, ended_cpu_seconds=1000.0).write(tmp_path)
    registry.register(Processes(partial(worker_table.read, tmp_path)))
    single = {
        family.name: family.samples[0].value for family in ProcessCollector(registry=None).collect()
    }

    def value(name: str) -> float:
        found = registry.get_sample_value(name)
        assert found is not None
        return found

    assert value("process_start_time_seconds") == single["process_start_time_seconds"]
    assert value("process_max_fds") == 2 * single["process_max_fds"]
    assert value("process_cpu_seconds_total") == pytest.approx(
        1000 + 2 * single["process_cpu_seconds"], abs=5
    )
    memory = value("process_resident_memory_bytes")
    assert 0 < memory < 2.2 * single["process_resident_memory_bytes"]


def test_statistics_are_of_all_workers_and_the_last_call_is_the_latest(
    tmp_path: Path, tiny: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [
        Metrics(CollectorRegistry(), SharedCounters(tmp_path, number)).model("tiny", 1, tiny)
        for number in range(3)
    ]
    assert workers[2].statistics.last == 0
    for worker, now in zip(workers[:2], (2000.5, 1000.0), strict=True):
        monkeypatch.setattr(model_metrics, "time", lambda now=now: now)
        worker.executed([0.0], 2, 0.5, result_of(0.0, [2, 0, 0], [0.1, 0.0, 0.0]))
        worker.failed(1.0)
    found = workers[2].statistics
    assert (found.last, found.rows, found.failures) == (2000.5, 4, 2)
    assert (found.request_seconds, found.failure_seconds) == (1.0, 2.0)
