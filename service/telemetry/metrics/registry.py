"""Every metric of the server. The registry is passed in; nothing here is global.

Requests are counted in `Counters`; they become metrics when scraped, as the sum over all workers.
"""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.bundle import Bundle
from service.shared_state import worker_table
from service.shared_state.counters import Block, Counters, LocalCounters, Values, totals
from service.shared_state.worker_table import WorkerTable
from service.telemetry.metrics.drift import shadow_families
from service.telemetry.metrics.http import DENIED, REJECTED, HttpMetrics, http_families
from service.telemetry.metrics.model import OF_A_MODEL, QUEUE_ROWS, Counted, ModelMetrics
from service.telemetry.metrics.model_families import expert_families, model_families
from service.telemetry.metrics.model_gauges import ModelGauges
from service.telemetry.metrics.promises import promise_families
from service.telemetry.metrics.versions import VersionMetrics, load_families

# What a block counts: the first part of its key.
LOADED, LOG_DROPPED = "loaded", "log dropped"
WINDOW_SECONDS = 300.0


class Metrics:
    def __init__(
        self,
        registry: CollectorRegistry,
        counters: Counters | None = None,
        read_workers: Callable[[], WorkerTable] = worker_table.single_process,
    ) -> None:
        self.registry = registry
        self.counters = LocalCounters() if counters is None else counters
        self._read_workers = read_workers
        self._models: list[ModelMetrics] = []
        self._rejected: dict[tuple[str, str], Values] = {}
        self._log_dropped = self.counters.block((LOG_DROPPED,), 1)
        self.http = HttpMetrics(self.counters)
        self.versions = VersionMetrics(registry, self.counters)
        self._gauges = ModelGauges(registry)
        self.keys_reload_failed = Gauge(
            "dss_keys_reload_failed",
            "1 if the key file is wrong; the previous keys are kept.",
            registry=registry,
        )
        self.tls_reload_failed = Gauge(
            "dss_tls_reload_failed",
            "1 if the certificate is wrong; the previous one is kept.",
            registry=registry,
        )
        registry.register(CountedFamilies(self.read, self._read_workers, self._models))

    def model(
        self,
        name: str,
        version: int,
        bundle: Bundle,
        *,
        window_seconds: float = WINDOW_SECONDS,
        shadow_size: int = 0,
        own_series: int | None = None,
        modes: bool = False,
    ) -> ModelMetrics:
        """The metrics of one loaded model, of whose experts `own_series` have their own; `modes`:
        whether it can answer exactly."""
        model = ModelMetrics(
            self._gauges,
            self.counters,
            name,
            str(version),
            bundle,
            window_seconds,
            shadow_size,
            own_series,
            modes,
        )
        self._models.append(model)
        return model

    def forget(self, model: ModelMetrics) -> None:
        """A version is no longer loaded. Another one with its labels may have taken its place."""
        self._models.remove(model)
        model.watch_queue(lambda: 0)
        successors = [other for other in self._models if other.labels == model.labels]
        for gauge, labels in model.series.difference(*(other.series for other in successors)):
            gauge.remove(*labels)
        if not successors:
            self.versions.forget(*model.labels)
            for what in OF_A_MODEL:
                self.counters.drop((what, *model.labels))

    def forget_unloaded(self) -> None:
        """Drop what the worker before this one counted of versions that are no longer loaded."""
        loaded = {model.labels for model in self._models}
        for key in {block.key for block in self.counters.blocks()}:
            if key[0] in OF_A_MODEL and key[1:] not in loaded:
                self.counters.drop(key)

    def rejected(self, model: str, reason: str) -> None:
        """A top-k request was not answered; the model is empty if none was found."""
        count = self._rejected.get((model, reason))
        if count is None:
            count = self.counters.block((REJECTED, model, reason), 1)
            self._rejected[model, reason] = count
        count[0] += 1

    def denied(self, reason: str) -> None:
        """A client may not do what it asked for."""
        self.counters.block((DENIED, reason), 1)[0] += 1

    def log_lines_dropped(self, lines: int) -> None:
        """They could not be written. Any thread may call this, but one at a time."""
        self._log_dropped[0] += lines

    def loaded(self) -> None:
        """This worker has loaded its models."""
        self.counters.block((LOADED,), 1)[0] = 1

    @property
    def loaded_workers(self) -> int:
        """How many workers have loaded their models, now or before they were replaced."""
        return sum(bool(block.values[0]) for block in self.counters.blocks((LOADED,)))

    def publish_queues(self) -> None:
        """Show the other workers how many rows wait here."""
        for model in self._models:
            model.publish_queue()

    def look(self, now: float) -> None:
        """Note what has been counted so far: a later window of drift begins with it."""
        due = [model for model in list(self._models) if model.drift.is_due(now)]
        counted = totals(self.read()) if due else {}
        for model in due:
            model.drift.look(now, model.traffic(counted))

    def read(self) -> list[Block]:
        """The blocks of all workers, those about queues only of workers that are alive."""
        self.publish_queues()
        alive = self._read_workers().workers
        return [
            block
            for block in self.counters.blocks()
            if block.key[0] != QUEUE_ROWS or block.worker in alive
        ]


class CountedFamilies(Collector):
    """Everything that is counted, summed over all workers when scraped."""

    def __init__(
        self,
        read: Callable[[], Sequence[Block]],
        read_workers: Callable[[], WorkerTable],
        models: Sequence[ModelMetrics],
    ) -> None:
        self._read = read
        self._read_workers = read_workers
        self._models = models  # those loaded now

    def describe(self) -> Iterator[Metric]:
        """The families without a sample: the registry checks their names by it."""
        return _families({}, WorkerTable(), [])

    def collect(self) -> Iterator[Metric]:
        return _families(totals(self._read()), self._read_workers(), list(self._models))


def _families(
    counted: Counted, workers: WorkerTable, models: Sequence[ModelMetrics]
) -> Iterator[Metric]:
    yield from http_families(counted)
    yield from load_families(counted)
    yield from _log_families(counted)
    yield from model_families(counted)
    yield from expert_families(models, counted)
    yield from shadow_families(counted)
    yield from promise_families(counted)
    yield from _worker_families(workers)


def _log_families(counted: Counted) -> Iterator[Metric]:
    dropped = counted.get((LOG_DROPPED,))
    yield CounterMetricFamily(
        "dss_log_lines_dropped_total",
        "Log lines lost because nobody read them in time.",
        value=0.0 if dropped is None else float(dropped[0]),
    )


def _worker_families(table: WorkerTable) -> Iterator[Metric]:
    yield GaugeMetricFamily("dss_workers", "Worker processes that run.", value=len(table.workers))
    yield CounterMetricFamily(
        "dss_worker_restarts_total", "Workers that died and were replaced.", value=table.restarts
    )
