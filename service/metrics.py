"""Every metric, named once. The registry is passed in; nothing here is global.

Utilization and the live FLOPs speedup are computed when scraped, from the rows answered since the
start, and are absent until there are any: an idle model has no ratio, and none is made up.
"""

import threading
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.backend import TopK
from service.bundle import Bundle, flops_speedup

SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0
)  # fmt: skip
# An expert takes tens of microseconds, and there is one histogram for each: fewer, lower buckets.
EXPERT_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.005, 0.025, 0.1)

MODEL = ("model", "version")
EXPERT = (*MODEL, "expert")


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def counter(name: str, text: str, labels: Sequence[str]) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, labels: Sequence[str]) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def seconds(
            name: str, text: str, labels: Sequence[str], buckets: Sequence[float] = SECONDS
        ) -> Histogram:
            return Histogram(name, text, labels, registry=registry, buckets=buckets)

        self.http_requests = counter(
            "dss_http_requests_total", "HTTP requests answered.", ("route", "method", "status")
        )
        self.http_seconds = seconds(
            "dss_http_request_seconds", "From the request's head to its answer's.", ("route",)
        )
        self.requests = counter("dss_requests_total", "Top-k requests answered.", MODEL)
        self.rows = counter("dss_rows_total", "Rows answered.", MODEL)
        self.executions = counter("dss_executions_total", "Engine calls.", MODEL)
        self.rejected_requests = counter(
            "dss_rejected_requests_total",
            "Top-k requests not answered, by reason; the model is empty if none was found.",
            ("model", "reason"),
        )
        self.queue_rows = gauge("dss_queue_rows", "Rows waiting for the engine.", MODEL)
        self.queue_seconds = seconds(
            "dss_queue_seconds", "How long a request waited for the engine.", MODEL
        )
        self.compute_seconds = seconds(
            "dss_compute_seconds", "How long an engine call took.", MODEL
        )
        self.gate_seconds = seconds(
            "dss_gate_compute_seconds", "How long the gate took in an engine call.", MODEL
        )
        self.expert_rows = counter("dss_expert_rows_total", "Rows scored by an expert.", EXPERT)
        self.expert_seconds = seconds(
            "dss_expert_compute_seconds",
            "How long one execution of an expert took.",
            EXPERT,
            EXPERT_SECONDS,
        )
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
        self.model_info = gauge(
            "dss_model_info",
            "1 for each model that is loaded.",
            (*MODEL, "n_classes", "hidden_size", "n_experts", "format_version", "created"),
        )
        self.refused_bundles = gauge(
            "dss_refused_bundles", "1 for each bundle that could not be loaded.", MODEL
        )
        self._live = LiveRatios()
        registry.register(self._live)

    def model(self, name: str, version: int, bundle: Bundle) -> "ModelMetrics":
        """The metrics of one loaded model, with their labels looked up once."""
        model = ModelMetrics(self, name, str(version), bundle)
        self._live.models.append(model)
        return model


class ModelMetrics:
    """One model's counters; `executed` is on the hot path and looks up no label."""

    def __init__(self, metrics: Metrics, name: str, version: str, bundle: Bundle) -> None:
        manifest = bundle.manifest
        self.labels = (name, version)
        self.n_classes = manifest.n_classes
        self.expert_costs = bundle.expert_costs
        n_experts = manifest.n_experts
        self._lock = threading.Lock()
        self._rows = 0
        self._expert_rows = [0] * n_experts
        self._expert_runs = [0] * n_experts
        self._expert_seconds = [0.0] * n_experts

        self._queue_rows = metrics.queue_rows.labels(*self.labels)
        self._requests_total = metrics.requests.labels(*self.labels)
        self._rows_total = metrics.rows.labels(*self.labels)
        self._executions_total = metrics.executions.labels(*self.labels)
        self._queue_histogram = metrics.queue_seconds.labels(*self.labels)
        self._compute_histogram = metrics.compute_seconds.labels(*self.labels)
        self._gate_histogram = metrics.gate_seconds.labels(*self.labels)
        experts = [(*self.labels, str(expert)) for expert in range(n_experts)]
        self._expert_rows_total = [metrics.expert_rows.labels(*expert) for expert in experts]
        self._expert_histograms = [metrics.expert_seconds.labels(*expert) for expert in experts]

        for expert, size, cost, share in zip(
            experts,
            manifest.expert_sizes,
            self.expert_costs,
            manifest.training.utilization,
            strict=True,
        ):
            metrics.expert_classes.labels(*expert).set(size)
            metrics.expert_cost.labels(*expert).set(cost)
            metrics.trained_utilization.labels(*expert).set(share)
        metrics.trained_speedup.labels(*self.labels).set(manifest.training.flops_speedup)
        metrics.model_info.labels(
            *self.labels,
            str(manifest.n_classes),
            str(manifest.hidden_size),
            str(n_experts),
            str(manifest.format_version),
            manifest.created,
        ).set(1)

    def watch_queue(self, rows: Callable[[], float]) -> None:
        """The queue is asked for its length when scraped."""
        self._queue_rows.set_function(rows)

    def executed(self, waits: Sequence[float], rows: int, seconds: float, result: TopK) -> None:
        self._requests_total.inc(len(waits))
        self._rows_total.inc(rows)
        self._executions_total.inc()
        for wait in waits:
            self._queue_histogram.observe(wait)
        self._compute_histogram.observe(seconds)
        self._gate_histogram.observe(result.gate_seconds)
        for run in result.runs:
            self._expert_rows_total[run.expert].inc(run.rows)
            self._expert_histograms[run.expert].observe(run.seconds)
        with self._lock:
            self._rows += rows
            for run in result.runs:
                self._expert_rows[run.expert] += run.rows
                self._expert_runs[run.expert] += 1
                self._expert_seconds[run.expert] += run.seconds

    @property
    def expert_rows(self) -> list[int]:
        with self._lock:
            return list(self._expert_rows)

    @property
    def expert_mean_seconds(self) -> list[float | None]:
        """Of one execution, whatever its number of rows; None for an expert never run."""
        with self._lock:
            return [
                seconds / runs if runs else None
                for seconds, runs in zip(self._expert_seconds, self._expert_runs, strict=True)
            ]

    @property
    def utilization(self) -> list[float] | None:
        """u_k: rows scored by each expert per row answered; None before the first row.

        They sum to 1 when each row needs one expert, and to more when rows search several.
        """
        with self._lock:
            if not self._rows:
                return None
            return [rows / self._rows for rows in self._expert_rows]

    @property
    def flops_speedup(self) -> float | None:
        utilization = self.utilization
        if utilization is None:
            return None
        return flops_speedup(self.n_classes, self.expert_costs, utilization)


class LiveRatios(Collector):
    """Gauges worked out from the counts at scrape time."""

    def __init__(self) -> None:
        self.models: list[ModelMetrics] = []

    def describe(self) -> Iterator[Metric]:
        """The families without a sample: the registry checks their names by it."""
        return self._families([])

    def collect(self) -> Iterator[Metric]:
        return self._families(list(self.models))

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
