"""The usual process_* metrics for several processes that serve as one."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.shared_state.worker_table import WorkerTable

CPU = "process_cpu_seconds"
RESIDENT = "process_resident_memory_bytes"
START = "process_start_time_seconds"


class Processes(Collector):
    """Sums over the supervisor, the fork server and the workers that are alive.

    A page of memory that several of them share counts once, workers that have ended keep their
    part of the CPU time, and the start is the first one's.
    """

    def __init__(self, read_workers: Callable[[], WorkerTable]) -> None:
        self._read_workers = read_workers

    def describe(self) -> Iterator[Metric]:
        return self._families(WorkerTable({0: os.getpid()}))

    def collect(self) -> Iterator[Metric]:
        return self._families(self._read_workers())

    def _families(self, table: WorkerTable) -> Iterator[Metric]:
        others = (table.supervisor, table.fork_server)
        processes = [*table.workers.values(), *(process for process in others if process)]
        texts: dict[str, str] = {}
        values: dict[str, list[float]] = {}
        for process in processes:
            for family in _of(process):
                texts[family.name] = family.documentation
                values.setdefault(family.name, []).append(family.samples[0].value)
        if RESIDENT in values:
            values[RESIDENT] = [_share(process) for process in processes] or values[RESIDENT]
        for name, found in values.items():
            if name == CPU:
                total = sum(found) + table.ended_cpu_seconds
                yield CounterMetricFamily(name, texts[name], value=total)
            else:
                value = min(found) if name == START else sum(found)
                yield GaugeMetricFamily(name, texts[name], value=value)


def _of(process: int) -> list[Metric]:
    return list(ProcessCollector(pid=lambda: process, registry=None).collect())


def _share(process: int) -> float:
    """Resident bytes, a page shared by n processes being an n-th of itself for each."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended, or the kernel has no such file
        return 0.0
    return sum(1024.0 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
