"""Every metric, named once. The registry is passed in; nothing here is global.

What a request touches is counted in cells (see `cells.py`) and becomes metrics when scraped, as
the sum over all workers. Utilization and the live FLOPs speedup are worked out from those sums,
and are absent until there are any rows: an idle model has no ratio, and none is made up.
"""

from collections.abc import Callable, Iterator, Sequence
from time import time
from typing import NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from service.bundle import Bundle, flops_speedup
from service.engine.kernels import call_counts
from service.engine.kernels.call_counts import EXPERT_SECONDS, SECONDS
from service.shared_state import worker_table
from service.shared_state.counters import Block, Counters, Key, LocalCounters, Values, totals
from service.shared_state.worker_table import WorkerTable
from service.telemetry.metrics.drift_metrics import SHADOW, Drift, drift_families, shadow_families
from service.telemetry.metrics.http import (
    DENIED,
    REJECTED,
    HttpMetrics,
    add_histogram,
    http_families,
)
from service.telemetry.metrics.versions import VersionMetrics, load_families
from service.topk import TopK

MODEL = ("model", "version")
EXPERT = (*MODEL, "expert")

# What a sheet counts: the first part of its key.
MODEL_CALLS, QUEUE_ROWS, LOADED = "model", "queue", "loaded"
LOG_DROPPED = "log dropped"
FAILED = "failed"
WINDOW_SECONDS = 300.0
OF_A_VERSION = (MODEL_CALLS, QUEUE_ROWS, FAILED, SHADOW)


class Metrics:
    def __init__(
        self,
        registry: CollectorRegistry,
        cells: Counters | None = None,
        read_roster: Callable[[], WorkerTable] = worker_table.single_process,
    ) -> None:
        self.registry = registry
        self._cells = LocalCounters() if cells is None else cells
        self._read_roster = read_roster
        self._models: list[ModelMetrics] = []
        self._rejected: dict[tuple[str, str], Values] = {}
        self._log_dropped = self._cells.block((LOG_DROPPED,), 1)
        self.http = HttpMetrics(self._cells)

        def gauge(name: str, text: str, labels: Sequence[str]) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        # The same in every worker, so that each shows its own.
        self.expert_classes = gauge("dss_expert_classes", "Classes held by an expert.", EXPERT)
        self.expert_cost = gauge(
            "dss_expert_cost_rows",
            "What a row costs an expert, in classes scored: less than it holds if approximated.",
            EXPERT,
        )
        self.trained_utilization = gauge(
            "dss_trained_expert_utilization_ratio",
            "Share of the training run's test rows that chose an expert.",
            EXPERT,
        )
        self.trained_speedup = gauge(
            "dss_trained_flops_speedup_ratio", "FLOPs speedup measured in training.", MODEL
        )
        self.trained_recall = gauge(
            "dss_trained_recall_ratio",
            "Of the full softmax's first classes, the share among ours, as measured at export.",
            (*MODEL, "at"),
        )
        self.model_info = gauge(
            "dss_model_info",
            "1 for each model that is loaded.",
            (*MODEL, "n_classes", "hidden_size", "n_experts", "format_version", "created"),
        )
        self.versions = VersionMetrics(registry, self._cells)
        self.keys_reload_failed = gauge(
            "dss_keys_reload_failed", "1 if the key file is wrong and the keys of before stay.", ()
        )
        self.tls_reload_failed = gauge(
            "dss_tls_reload_failed", "1 if the certificate is wrong and the one before stays.", ()
        )
        registry.register(Counted(self.read, self._read_roster))
        registry.register(LiveRatios(self._models))

    def model(
        self,
        name: str,
        version: int,
        bundle: Bundle,
        *,
        window_seconds: float = WINDOW_SECONDS,
        shadow_size: int = 0,
    ) -> "ModelMetrics":
        """The metrics of one loaded model, with their labels looked up once."""
        model = ModelMetrics(
            self, self._cells, name, str(version), bundle, window_seconds, shadow_size
        )
        self._models.append(model)
        return model

    def forget(self, model: "ModelMetrics") -> None:
        """A version is no longer loaded. Another one with its labels may have taken its place."""
        self._models.remove(model)
        model.watch_queue(lambda: 0)
        heirs = [other for other in self._models if other.labels == model.labels]
        inherited = {series for heir in heirs for series in heir.series}
        for gauge, labels in model.series:
            if (gauge, labels) not in inherited:
                gauge.remove(*labels)
        if not heirs:
            self.versions.forget(*model.labels)
            for what in OF_A_VERSION:
                self._cells.drop((what, *model.labels))

    def forget_strangers(self) -> None:
        """Drop what the worker before this one counted of versions that are no longer loaded."""
        known = {model.labels for model in self._models}
        for key in {sheet.key for sheet in self._cells.blocks()}:
            if key[0] in OF_A_VERSION and key[1:] not in known:
                self._cells.drop(key)

    def rejected(self, model: str, reason: str) -> None:
        """A top-k request was not answered; the model is empty if none was found."""
        cells = self._rejected.get((model, reason))
        if cells is None:
            cells = self._cells.block((REJECTED, model, reason), 1)
            self._rejected[model, reason] = cells
        cells[0] += 1

    def denied(self, reason: str) -> None:
        """Someone may not do what they asked for."""
        self._cells.block((DENIED, reason), 1)[0] += 1

    @property
    def cells(self) -> Counters:
        return self._cells

    def log_lines_dropped(self, lines: int) -> None:
        """They could not be written. Any thread may say so, but one at a time."""
        self._log_dropped[0] += lines

    def loaded(self) -> None:
        """This worker has loaded its models."""
        self._cells.block((LOADED,), 1)[0] = 1

    @property
    def loaded_workers(self) -> int:
        """How many workers have loaded their models, now or before they were replaced."""
        return sum(bool(sheet.values[0]) for sheet in self._cells.blocks((LOADED,)))

    def publish_queues(self) -> None:
        """Show the other workers how many rows wait here."""
        for model in self._models:
            model.publish_queue()

    def look(self, now: float) -> None:
        """Note what has been counted so far: it is the beginning of a window later."""
        for model in list(self._models):
            if model.drift.is_due(now):
                model.drift.look(now, model.traffic)

    def read(self) -> list[Block]:
        """The sheets of all workers, those about queues only of workers that are alive."""
        self.publish_queues()
        alive = self._read_roster().workers
        return [
            sheet
            for sheet in self._cells.blocks()
            if sheet.key[0] != QUEUE_ROWS or sheet.worker in alive
        ]


class Statistics(NamedTuple):
    """What became of a model's requests, in all workers together."""

    last: float  # when an engine call ended last, in seconds since the epoch; 0 before any
    requests: int  # that were answered
    rows: int
    executions: int
    queue_seconds: float
    request_seconds: float  # in the engine, as each request saw it
    failures: int
    failure_seconds: float


class ModelMetrics:
    """One model's cells; `executed` is on the hot path and looks up no label."""

    def __init__(
        self,
        metrics: Metrics,
        cells: Counters,
        name: str,
        version: str,
        bundle: Bundle,
        window_seconds: float,
        shadow_size: int,
    ) -> None:
        manifest = bundle.manifest
        n_experts = manifest.n_experts
        self.labels = (name, version)
        self.n_classes = manifest.n_classes
        self.expert_costs = bundle.expert_costs
        self._all_cells = cells
        self._key = (MODEL_CALLS, *self.labels)
        self._cells = cells.block(self._key, call_counts.size(n_experts))
        self._queue_cell = cells.block((QUEUE_ROWS, *self.labels), 1)
        self._failed_key = (FAILED, *self.labels)
        self._failed = cells.block(self._failed_key, 2)  # requests and their seconds
        self._queue_rows: Callable[[], float] = lambda: 0
        self._shadow_key = (SHADOW, *self.labels)
        self.shadow = cells.block(self._shadow_key, shadow_size) if shadow_size else np.empty(0)
        self.drift = Drift(self.labels, manifest.training, window_seconds)
        self._tally = call_counts.compiled_tally()
        self._waits = np.zeros(1)
        self.series: list[tuple[Gauge, tuple[str, ...]]] = []  # what is shown of it

        experts = [(*self.labels, str(expert)) for expert in range(n_experts)]
        for expert, size, cost, share in zip(
            experts,
            manifest.expert_sizes,
            self.expert_costs,
            manifest.training.utilization,
            strict=True,
        ):
            self._show(metrics.expert_classes, expert, size)
            self._show(metrics.expert_cost, expert, cost)
            self._show(metrics.trained_utilization, expert, share)
        self._show(metrics.trained_speedup, self.labels, manifest.training.flops_speedup)
        for at, recall in (manifest.training.head_recall or {}).items():
            self._show(metrics.trained_recall, (*self.labels, at), recall)
        facts = (
            manifest.n_classes,
            manifest.hidden_size,
            n_experts,
            manifest.format_version,
            manifest.created,
        )
        self._show(metrics.model_info, (*self.labels, *map(str, facts)), 1)

    def _show(self, gauge: Gauge, labels: tuple[str, ...], value: float) -> None:
        gauge.labels(*labels).set(value)
        self.series.append((gauge, labels))

    def watch_queue(self, rows: Callable[[], float]) -> None:
        """The queue is asked for its length when scraped."""
        self._queue_rows = rows

    def publish_queue(self) -> None:
        self._queue_cell[0] = self._queue_rows()

    def executed(self, waits: Sequence[float], rows: int, seconds: float, result: TopK) -> None:
        """An engine call answered len(waits) requests, which had waited that many seconds.

        One call at a time: these cells have no lock.
        """
        requests = len(waits)
        if requests > len(self._waits):
            self._waits = np.zeros(2 * requests)
        if requests == 1:
            self._waits[0] = waits[0]
        else:
            self._waits[:requests] = waits
        self._tally(
            self._cells,
            self._waits,
            requests,
            rows,
            time(),
            seconds,
            result.gate_seconds,
            result.expert_rows,
            result.expert_seconds,
            result.experts,
            result.gates,
            self.drift.trained.edges,
        )

    def failed(self, seconds: float) -> None:
        """A request for this version was not answered. Only the event loop may say so."""
        self._failed[0] += 1
        self._failed[1] += seconds

    @property
    def statistics(self) -> "Statistics":
        """Over all workers."""
        cells = self._totals()
        failed = totals(self._all_cells.blocks(self._failed_key)).get(
            self._failed_key, self._failed
        )
        return Statistics(
            last=max(
                float(cells[call_counts.LAST]) for _, _, cells in self._all_cells.blocks(self._key)
            ),
            requests=int(cells[call_counts.REQUESTS]),
            rows=int(cells[call_counts.ROWS]),
            executions=int(cells[call_counts.EXECUTIONS]),
            queue_seconds=float(cells[call_counts.QUEUE]),
            request_seconds=float(cells[call_counts.REQUEST_SECONDS]),
            failures=int(failed[0]),
            failure_seconds=float(failed[1]),
        )

    def _totals(self) -> Values:
        """Over all workers."""
        return totals(self._all_cells.blocks(self._key)).get(self._key, self._cells)

    @property
    def expert_rows(self) -> list[int]:
        return [int(rows) for rows in _experts(self._totals())[:, call_counts.SCORED]]

    @property
    def expert_mean_seconds(self) -> list[float | None]:
        """Of one execution, whatever its number of rows; None for an expert never run."""
        experts = _experts(self._totals())
        took = experts[:, call_counts.TOOK]
        runs = experts[:, call_counts.TOOK + 1 :].sum(axis=1)
        return [float(s / n) if n else None for s, n in zip(took, runs, strict=True)]

    @property
    def traffic(self) -> Values:
        """What `Drift` compares: counts that only grow, over all workers."""
        cells = self._totals()
        chosen = _experts(cells)[: len(self.expert_costs), call_counts.CHOSEN]
        gates = cells[call_counts.CONFIDENCE : call_counts.CONFIDENCE + call_counts.GATE_BINS]
        shadow = self.shadow
        if len(shadow):
            shadow = totals(self._all_cells.blocks(self._shadow_key)).get(self._shadow_key, shadow)
        return np.concatenate([chosen, gates, shadow])

    @property
    def utilization(self) -> list[float] | None:
        """u_k: rows scored by each expert per row answered; None before the first row.

        They sum to 1 when each row needs one expert, and to more when rows search several.
        """
        cells = self._totals()
        if not cells[call_counts.ROWS]:
            return None
        return [
            float(rows / cells[call_counts.ROWS]) for rows in _experts(cells)[:, call_counts.SCORED]
        ]

    @property
    def flops_speedup(self) -> float | None:
        utilization = self.utilization
        if utilization is None:
            return None
        return flops_speedup(self.n_classes, self.expert_costs, utilization)


def _experts(cells: Values) -> Values:
    """A row of cells for each expert of a model's sheet."""
    return cells[call_counts.EXPERTS :].reshape(-1, call_counts.EXPERT)


class Counted(Collector):
    """Everything that is counted in cells, summed when scraped."""

    def __init__(
        self, read: Callable[[], Sequence[Block]], read_roster: Callable[[], WorkerTable]
    ) -> None:
        self._read = read
        self._read_roster = read_roster

    def describe(self) -> Iterator[Metric]:
        """The families without a sample: the registry checks their names by it."""
        yield from http_families({})
        yield from load_families({})
        yield from _log_families({})
        yield from _model_families({})
        yield from shadow_families({})
        yield from _worker_families(WorkerTable())

    def collect(self) -> Iterator[Metric]:
        counted = totals(self._read())
        yield from http_families(counted)
        yield from load_families(counted)
        yield from _log_families(counted)
        yield from _model_families(counted)
        yield from shadow_families(counted)
        yield from _worker_families(self._read_roster())


def _log_families(counted: dict[Key, Values]) -> Iterator[Metric]:
    cells = counted.get((LOG_DROPPED,))
    yield CounterMetricFamily(
        "dss_log_lines_dropped_total",
        "Log lines lost because nobody read them in time.",
        value=0.0 if cells is None else float(cells[0]),
    )


def _model_families(counted: dict[Key, Values]) -> Iterator[Metric]:
    requests = CounterMetricFamily("dss_requests_total", "Top-k requests answered.", labels=MODEL)
    rows = CounterMetricFamily("dss_rows_total", "Rows answered.", labels=MODEL)
    executions = CounterMetricFamily("dss_executions_total", "Engine calls.", labels=MODEL)
    queue_rows = GaugeMetricFamily("dss_queue_rows", "Rows waiting for the engine.", labels=MODEL)
    queue = HistogramMetricFamily(
        "dss_queue_seconds", "How long a request waited for the engine.", labels=MODEL
    )
    compute = HistogramMetricFamily(
        "dss_compute_seconds", "How long an engine call took.", labels=MODEL
    )
    gate = HistogramMetricFamily(
        "dss_gate_compute_seconds", "How long the gate took in an engine call.", labels=MODEL
    )
    expert_rows = CounterMetricFamily(
        "dss_expert_rows_total", "Rows scored by an expert.", labels=EXPERT
    )
    expert_seconds = HistogramMetricFamily(
        "dss_expert_compute_seconds", "How long one execution of an expert took.", labels=EXPERT
    )
    for (what, *labels), cells in counted.items():
        if what == QUEUE_ROWS:
            queue_rows.add_metric(labels, float(cells[0]))
        if what != MODEL_CALLS:
            continue
        requests.add_metric(labels, float(cells[call_counts.REQUESTS]))
        rows.add_metric(labels, float(cells[call_counts.ROWS]))
        executions.add_metric(labels, float(cells[call_counts.EXECUTIONS]))
        for family, first in (
            (queue, call_counts.QUEUE),
            (compute, call_counts.COMPUTE),
            (gate, call_counts.GATE),
        ):
            add_histogram(family, labels, cells[first : first + call_counts.HISTOGRAM], SECONDS)
        for expert, its_cells in enumerate(_experts(cells)):
            its_labels = (*labels, str(expert))
            expert_rows.add_metric(its_labels, float(its_cells[call_counts.SCORED]))
            add_histogram(expert_seconds, its_labels, its_cells[call_counts.TOOK :], EXPERT_SECONDS)
    yield requests
    yield rows
    yield executions
    yield queue_rows
    yield queue
    yield compute
    yield gate
    yield expert_rows
    yield expert_seconds


def _worker_families(seen: WorkerTable) -> Iterator[Metric]:
    yield GaugeMetricFamily("dss_workers", "Worker processes that run.", value=len(seen.workers))
    yield CounterMetricFamily(
        "dss_worker_restarts_total", "Workers that died and were replaced.", value=seen.restarts
    )


class LiveRatios(Collector):
    """Gauges worked out from the counts at scrape time."""

    def __init__(self, models: Sequence[ModelMetrics]) -> None:
        self._models = models

    def describe(self) -> Iterator[Metric]:
        """The families without a sample: the registry checks their names by it."""
        return self._families([])

    def collect(self) -> Iterator[Metric]:
        return self._families(list(self._models))

    def _families(self, models: Sequence[ModelMetrics]) -> Iterator[Metric]:
        utilization = GaugeMetricFamily(
            "dss_expert_utilization_ratio",
            "Rows scored by an expert per row answered.",
            labels=EXPERT,
        )
        speedup = GaugeMetricFamily(
            "dss_flops_speedup_ratio",
            "Live FLOPs speedup |V| / (sum cost_k u_k + K); a plain expert costs |v_k|.",
            labels=MODEL,
        )
        for model in models:
            for expert, share in enumerate(model.utilization or ()):
                utilization.add_metric((*model.labels, str(expert)), share)
            live = model.flops_speedup
            if live is not None:
                speedup.add_metric(model.labels, live)
        yield utilization
        yield speedup
        yield from drift_families((model.drift, model.traffic) for model in models)
