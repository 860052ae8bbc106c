"""What is counted and shown of one loaded model.

Utilization and the live FLOPs speedup are worked out from the counts when scraped, and are absent
until a row was answered: an idle model has no ratio.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from service.shared_state.counters import Counters, Key, Values, totals
from service.telemetry.metrics.drift import MODEL, SHADOW, Drift, drift_families
from service.telemetry.metrics.http import add_histogram
from service.topk import TopK

EXPERT = (*MODEL, "expert")

# What a block counts: the first part of its key.
MODEL_CALLS, QUEUE_ROWS, FAILED = "model", "queue", "failed"
OF_A_MODEL = (MODEL_CALLS, QUEUE_ROWS, FAILED, SHADOW)

Series = tuple[Gauge, tuple[str, ...]]  # a gauge and the values of its labels


class ModelGauges:
    """What a bundle says of a model. The same in every worker, so each shows its own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: Sequence[str]) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        self._expert_classes = gauge("dss_expert_classes", "Classes held by an expert.", EXPERT)
        self._expert_cost = gauge(
            "dss_expert_cost_rows",
            "What a row costs an expert, in classes scored: less than it holds if approximated.",
            EXPERT,
        )
        self._trained_utilization = gauge(
            "dss_trained_expert_utilization_ratio",
            "Share of the training run's test rows that chose an expert.",
            EXPERT,
        )
        self._trained_speedup = gauge(
            "dss_trained_flops_speedup_ratio", "FLOPs speedup measured in training.", MODEL
        )
        self._trained_recall = gauge(
            "dss_trained_recall_ratio",
            "Of the full softmax's first classes, the share among ours, as measured at export.",
            (*MODEL, "at"),
        )
        self._info = gauge(
            "dss_model_info",
            "1 for each model that is loaded.",
            (*MODEL, "n_classes", "hidden_size", "n_experts", "format_version", "created"),
        )

    def show(self, labels: tuple[str, str], bundle: Bundle) -> set[Series]:
        """Set the gauges of a model; what it shows is returned."""
        values = dict(self._values(labels, bundle))
        for (gauge, its_labels), value in values.items():
            gauge.labels(*its_labels).set(value)
        return {*values}

    def _values(self, labels: tuple[str, str], bundle: Bundle) -> Iterator[tuple[Series, float]]:
        manifest, training = bundle.manifest, bundle.manifest.training
        for gauge, values in (
            (self._expert_classes, manifest.expert_sizes),
            (self._expert_cost, bundle.expert_costs),
            (self._trained_utilization, training.utilization),
        ):
            for expert, value in enumerate(values):
                yield (gauge, (*labels, str(expert))), value
        yield (self._trained_speedup, labels), training.flops_speedup
        for at, recall in (training.head_recall or {}).items():
            yield (self._trained_recall, (*labels, at)), recall
        facts = (
            manifest.n_classes,
            manifest.hidden_size,
            manifest.n_experts,
            manifest.format_version,
            manifest.created,
        )
        yield (self._info, (*labels, *map(str, facts))), 1


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
    """One model's counters. Their labels are looked up once, since every call counts here."""

    def __init__(
        self,
        gauges: ModelGauges,
        counters: Counters,
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
        self._counters = counters
        self._key = (MODEL_CALLS, *self.labels)
        self._calls = counters.block(self._key, call_counts.size(n_experts))
        self._queue = counters.block((QUEUE_ROWS, *self.labels), 1)
        self._failed_key = (FAILED, *self.labels)
        self._failed = counters.block(self._failed_key, 2)  # requests and their seconds
        self._queue_rows: Callable[[], float] = lambda: 0
        self._shadow_key = (SHADOW, *self.labels)
        self.shadow = counters.block(self._shadow_key, shadow_size) if shadow_size else np.empty(0)
        self.drift = Drift(self.labels, manifest.training, window_seconds)
        self.series = gauges.show(self.labels, bundle)
        self._add_call = call_counts.compiled_add_call()
        self._waits = np.zeros(1)

    def watch_queue(self, rows: Callable[[], float]) -> None:
        """The queue is asked for its length when scraped."""
        self._queue_rows = rows

    def publish_queue(self) -> None:
        self._queue[0] = self._queue_rows()

    def executed(self, waits: Sequence[float], rows: int, seconds: float, result: TopK) -> None:
        """An engine call answered len(waits) requests, which had waited that many seconds.

        One call at a time: the counters have no lock.
        """
        requests = len(waits)
        if requests > len(self._waits):
            self._waits = np.zeros(2 * requests)
        if requests == 1:
            self._waits[0] = waits[0]
        else:
            self._waits[:requests] = waits
        self._add_call(
            self._calls,
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
        """A request for this version was not answered. Called on the event loop alone."""
        self._failed[0] += 1
        self._failed[1] += seconds

    @property
    def statistics(self) -> Statistics:
        """Over all workers."""
        calls = self._totals()
        failed = totals(self._counters.blocks(self._failed_key)).get(self._failed_key, self._failed)
        return Statistics(
            last=max(
                float(calls[call_counts.LAST]) for _, _, calls in self._counters.blocks(self._key)
            ),
            requests=int(calls[call_counts.REQUESTS]),
            rows=int(calls[call_counts.ROWS]),
            executions=int(calls[call_counts.EXECUTIONS]),
            queue_seconds=float(calls[call_counts.QUEUE]),
            request_seconds=float(calls[call_counts.REQUEST_SECONDS]),
            failures=int(failed[0]),
            failure_seconds=float(failed[1]),
        )

    def _totals(self) -> Values:
        """Over all workers."""
        return totals(self._counters.blocks(self._key)).get(self._key, self._calls)

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
        calls = self._totals()
        chosen = _experts(calls)[: len(self.expert_costs), call_counts.CHOSEN]
        gates = calls[call_counts.CONFIDENCE : call_counts.CONFIDENCE + call_counts.GATE_BINS]
        shadow = self.shadow
        if len(shadow):
            shadow = totals(self._counters.blocks(self._shadow_key)).get(self._shadow_key, shadow)
        return np.concatenate([chosen, gates, shadow])

    @property
    def utilization(self) -> list[float] | None:
        """u_k: rows scored by each expert per row answered; None before the first row.

        They sum to 1 when each row needs one expert, and to more when rows search several.
        """
        calls = self._totals()
        if not calls[call_counts.ROWS]:
            return None
        return [
            float(rows / calls[call_counts.ROWS]) for rows in _experts(calls)[:, call_counts.SCORED]
        ]

    @property
    def flops_speedup(self) -> float | None:
        utilization = self.utilization
        if utilization is None:
            return None
        return flops_speedup(self.n_classes, self.expert_costs, utilization)


def _experts(calls: Values) -> Values:
    """A row of counters for each expert of a model's block."""
    return calls[call_counts.EXPERTS :].reshape(-1, call_counts.EXPERT)


def model_families(counted: Mapping[Key, Values]) -> Iterator[Metric]:
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
    for (what, *labels), counters in counted.items():
        if what == QUEUE_ROWS:
            queue_rows.add_metric(labels, float(counters[0]))
        if what != MODEL_CALLS:
            continue
        requests.add_metric(labels, float(counters[call_counts.REQUESTS]))
        rows.add_metric(labels, float(counters[call_counts.ROWS]))
        executions.add_metric(labels, float(counters[call_counts.EXECUTIONS]))
        for family, first in (
            (queue, call_counts.QUEUE),
            (compute, call_counts.COMPUTE),
            (gate, call_counts.GATE),
        ):
            add_histogram(family, labels, counters[first : first + call_counts.HISTOGRAM], SECONDS)
        for expert, counts in enumerate(_experts(counters)):
            its_labels = (*labels, str(expert))
            expert_rows.add_metric(its_labels, float(counts[call_counts.SCORED]))
            add_histogram(expert_seconds, its_labels, counts[call_counts.TOOK :], EXPERT_SECONDS)
    yield requests
    yield rows
    yield executions
    yield queue_rows
    yield queue
    yield compute
    yield gate
    yield expert_rows
    yield expert_seconds


class LiveRatios(Collector):
    """Gauges worked out from the counts when scraped."""

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
