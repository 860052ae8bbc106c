"""What is shown of the loaded models, worked out from the counts when scraped.

Utilization and the live FLOPs speedup are absent until a row was answered: an idle model has no
ratio.
"""

from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from service.engine.kernels import call_counts
from service.engine.kernels.call_counts import EXPERT_SECONDS, SECONDS
from service.telemetry.metrics.drift import MODEL, drift_families
from service.telemetry.metrics.http import add_histogram
from service.telemetry.metrics.model import (
    MODEL_CALLS,
    QUEUE_ROWS,
    Counted,
    ModelMetrics,
    experts_of,
)
from service.telemetry.metrics.model_gauges import EXPERT


def model_families(counted: Counted) -> Iterator[Metric]:
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
    yield from (requests, rows, executions, queue_rows, queue, compute, gate)


def expert_families(models: Sequence[ModelMetrics], counted: Counted) -> Iterator[Metric]:
    """Of versions that this worker has loaded: it knows which experts have their own series."""
    rows = CounterMetricFamily("dss_expert_rows_total", "Rows scored by an expert.", labels=EXPERT)
    scored = CounterMetricFamily(
        "dss_scored_classes_total",
        "Classes scored by experts and by scans of all; an approximated expert's at its cost.",
        labels=MODEL,
    )
    seconds = HistogramMetricFamily(
        "dss_expert_compute_seconds", "How long one execution of an expert took.", labels=EXPERT
    )
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
    # Two versions with the same labels are loaded while one takes the other's place.
    models = list({model.labels: model for model in models}.values())
    for model in models:
        calls = counted.get((MODEL_CALLS, *model.labels))
        if calls is None:
            continue
        scored.add_metric(model.labels, model.scored_classes(counted))
        answered = float(calls[call_counts.ROWS])
        for expert, counts in model.experts.of(experts_of(calls)):
            labels = (*model.labels, expert)
            rows.add_metric(labels, float(counts[call_counts.SCORED]))
            add_histogram(seconds, labels, counts[call_counts.TOOK :], EXPERT_SECONDS)
            if answered:
                utilization.add_metric(labels, float(counts[call_counts.SCORED]) / answered)
        live = model.flops_speedup(counted)
        if live is not None:
            speedup.add_metric(model.labels, live)
    yield from (rows, scored, seconds, utilization, speedup)
    yield from drift_families((model.drift, model.traffic(counted)) for model in models)
