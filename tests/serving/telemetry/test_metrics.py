"""The registry by itself; other tests read the same counts from a live server."""

import time

import numpy as np
import pytest
from helpers.fake_engine import result_of
from helpers.tiny_bundle import SIZES, rows_for
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram

from service.bundle import Bundle
from service.engine import Engine
from service.engine.kernels.call_counts import EXPERT_SECONDS, SECONDS
from service.telemetry.metrics.model import ModelMetrics, Statistics
from service.telemetry.metrics.registry import Metrics

TINY = {"model": "tiny", "version": "1"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def model(registry: CollectorRegistry, tiny: Bundle) -> ModelMetrics:
    return Metrics(registry).model("tiny", 1, tiny)


def test_the_names_are_those_dashboards_use(registry: CollectorRegistry) -> None:
    Metrics(registry)
    assert {family.name for family in registry.collect()} == {
        "dss_http_requests",  # the client library adds _total
        "dss_http_request_seconds",
        "dss_requests",
        "dss_rows",
        "dss_executions",
        "dss_rejected_requests",
        "dss_denied_requests",
        "dss_keys_reload_failed",
        "dss_tls_reload_failed",
        "dss_log_lines_dropped",
        "dss_queue_rows",
        "dss_queue_seconds",
        "dss_compute_seconds",
        "dss_gate_compute_seconds",
        "dss_expert_rows",
        "dss_scored_classes",
        "dss_model_classes",
        "dss_model_experts",
        "dss_effective_experts",
        "dss_trained_effective_experts",
        "dss_expert_compute_seconds",
        "dss_expert_classes",
        "dss_expert_cost_rows",
        "dss_expert_utilization_ratio",
        "dss_flops_speedup_ratio",
        "dss_trained_flops_speedup_ratio",
        "dss_trained_expert_utilization_ratio",
        "dss_trained_recall_ratio",
        "dss_utilization_drift_ratio",
        "dss_gate_drift_ratio",
        "dss_drift_window_rows",
        "dss_shadow_rows",
        "dss_shadow_hits",
        "dss_shadow_dropped_rows",
        "dss_shadow_recall_ratio",
        "dss_answered_rows",
        "dss_contract_rows",
        "dss_contract_withdrawn_rows",
        "dss_contract_checked_rows",
        "dss_contract_checked",
        "dss_contract_misses",
        "dss_contract_allowed_misses",
        "dss_model_info",
        "dss_refused_bundles",
        "dss_model_label_version",
        "dss_model_load_seconds",
        "dss_model_loads",
        "dss_workers",
        "dss_worker_restarts",
    }


def test_two_servers_in_one_process_do_not_share_counts(tiny: Bundle, tiny_engine: Engine) -> None:
    one, other = CollectorRegistry(), CollectorRegistry()
    result = tiny_engine.topk(rows_for(0), 1)
    Metrics(one).model("tiny", 1, tiny).executed([0.0], 1, 0.1, result)
    Metrics(other).model("tiny", 1, tiny)
    assert one.get_sample_value("dss_rows_total", TINY) == 1
    assert other.get_sample_value("dss_rows_total", TINY) == 0


def test_what_training_measured_is_there_from_the_start(
    registry: CollectorRegistry, model: ModelMetrics
) -> None:
    assert model.labels == ("tiny", "1")
    for expert, (size, share) in enumerate(zip(SIZES, (0.5, 0.25, 0.25), strict=True)):
        labels = TINY | {"expert": str(expert)}
        assert registry.get_sample_value("dss_expert_classes", labels) == size
        assert registry.get_sample_value("dss_expert_cost_rows", labels) == size
        assert registry.get_sample_value("dss_trained_expert_utilization_ratio", labels) == share
    # 12 / (5 * 0.5 + 4 * 0.25 + 4 * 0.25 + 3)
    trained = registry.get_sample_value("dss_trained_flops_speedup_ratio", TINY)
    assert trained == pytest.approx(12 / 7.5)


def test_live_ratios_are_absent_before_the_first_row(
    registry: CollectorRegistry, model: ModelMetrics
) -> None:
    assert model.flops_speedup() is None
    assert registry.get_sample_value("dss_flops_speedup_ratio", TINY) is None
    assert registry.get_sample_value("dss_expert_utilization_ratio", TINY | {"expert": "0"}) is None
    assert registry.get_sample_value("dss_rows_total", TINY) == 0


def test_an_execution_is_counted_exactly(
    registry: CollectorRegistry, model: ModelMetrics, tiny_engine: Engine
) -> None:
    result = tiny_engine.topk(rows_for(0, 1, 1, 1), 2)
    model.executed([0.001, 0.2], 4, 0.03, result)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, TINY | labels)

    assert value("dss_requests_total") == 2
    assert value("dss_rows_total") == 4
    assert value("dss_executions_total") == 1
    assert value("dss_queue_seconds_count") == 2
    assert value("dss_queue_seconds_sum") == pytest.approx(0.201)
    assert value("dss_queue_seconds_bucket", le="0.001") == 1
    assert value("dss_compute_seconds_sum") == pytest.approx(0.03)
    assert value("dss_gate_compute_seconds_sum") == pytest.approx(result.gate_seconds)
    assert [value("dss_expert_rows_total", expert=str(e)) for e in range(3)] == [1, 3, 0]
    assert [value("dss_expert_compute_seconds_count", expert=str(e)) for e in range(3)] == [1, 1, 0]
    utilization = [value("dss_expert_utilization_ratio", expert=str(e)) for e in range(3)]
    assert utilization == [0.25, 0.75, 0.0]
    # |V| / (sum |v_k| u_k + K) = 12 / (5 * 0.25 + 4 * 0.75 + 3)
    assert value("dss_flops_speedup_ratio") == pytest.approx(12 / 7.25)


def test_searching_two_experts_counts_both(
    registry: CollectorRegistry, model: ModelMetrics, tiny_engine: Engine
) -> None:
    model.executed([0.0], 2, 0.1, tiny_engine.topk(rows_for(0, 1), 1, experts=3))
    for expert in range(3):
        labels = TINY | {"expert": str(expert)}
        assert registry.get_sample_value("dss_expert_utilization_ratio", labels) == 1
    speedup = registry.get_sample_value("dss_flops_speedup_ratio", TINY)
    assert speedup == pytest.approx(12 / (5 + 4 + 4 + 3))


def test_mean_seconds_are_per_execution(model: ModelMetrics, tiny_engine: Engine) -> None:
    answer = tiny_engine.topk(rows_for(0), 1)
    for seconds in (0.25, 0.75):
        rows, took = np.array([0, 7, 0]), np.array([0.0, seconds, 0.0])
        model.executed([0.0], 7, 1.0, answer._replace(expert_rows=rows, expert_seconds=took))
    assert model.expert_mean_seconds == [None, 0.5, None]
    assert model.expert_rows == [0, 14, 0]


def test_the_queue_is_asked_when_scraped(registry: CollectorRegistry, model: ModelMetrics) -> None:
    waiting = [3]
    model.watch_queue(lambda: waiting[0])
    assert registry.get_sample_value("dss_queue_rows", TINY) == 3
    waiting[0] = 5
    assert registry.get_sample_value("dss_queue_rows", TINY) == 5


def test_histograms_start_at_100_microseconds(
    registry: CollectorRegistry, model: ModelMetrics
) -> None:
    assert model.labels == ("tiny", "1")
    buckets = [
        float(sample.labels["le"])
        for family in registry.collect()
        if family.name == "dss_queue_seconds"
        for sample in family.samples
        if sample.name.endswith("_bucket")
    ]
    assert min(buckets) == 0.0001


def samples(registry: CollectorRegistry, *families: str) -> dict[tuple[object, ...], float]:
    """Without the moment of creation, which is not shown."""
    return {
        (sample.name, *sorted(sample.labels.items())): pytest.approx(sample.value)
        for family in registry.collect()
        if family.name in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


SOME_SECONDS = st.one_of(
    st.floats(min_value=0, max_value=20), st.sampled_from((*SECONDS, *EXPERT_SECONDS))
)


@given(
    st.lists(
        st.tuples(st.sampled_from(["/a", "/b"]), st.sampled_from([200, 404]), SOME_SECONDS),
        max_size=20,
    )
)
def test_http_answers_look_as_a_counter_and_a_histogram(
    answers: list[tuple[str, int, float]],
) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    http = Metrics(ours).http
    requests = Counter("dss_http_requests", "HTTP.", ("route", "method", "status"), registry=theirs)
    seconds = Histogram(
        "dss_http_request_seconds", "HTTP.", ("route",), registry=theirs, buckets=SECONDS
    )
    for route, status, took in answers:
        http.answered(route, "POST", status, took)
        requests.labels(route, "POST", str(status)).inc()
        seconds.labels(route).observe(took)
    names = ("dss_http_requests", "dss_http_request_seconds")
    assert samples(ours, *names) == samples(theirs, *names)


CALLS = st.lists(
    st.tuples(
        st.lists(SOME_SECONDS, min_size=1, max_size=5),
        SOME_SECONDS,
        SOME_SECONDS,
        st.lists(st.integers(0, 5), min_size=3, max_size=3),
        st.lists(SOME_SECONDS, min_size=3, max_size=3),
    ),
    max_size=8,
)


@given(CALLS)
def test_engine_calls_look_as_counters_and_histograms(
    tiny: Bundle,
    calls: list[tuple[list[float], float, float, list[int], list[float]]],
) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    model = Metrics(ours).model("tiny", 1, tiny)
    counters = {
        name: Counter(name, name, TINY, registry=theirs).labels(**TINY)
        for name in ("dss_requests", "dss_rows", "dss_executions")
    }
    histograms = {
        name: Histogram(name, name, TINY, registry=theirs, buckets=SECONDS).labels(**TINY)
        for name in ("dss_queue_seconds", "dss_compute_seconds", "dss_gate_compute_seconds")
    }
    labels = [*TINY, "expert"]
    expert_rows = Counter("dss_expert_rows", "Rows.", labels, registry=theirs)
    expert_seconds = Histogram(
        "dss_expert_compute_seconds", "S.", labels, registry=theirs, buckets=EXPERT_SECONDS
    )
    for expert in range(3):
        expert_rows.labels(**TINY, expert=expert)
        expert_seconds.labels(**TINY, expert=expert)
    for waits, compute, gate, rows, seconds in calls:
        model.executed(waits, sum(rows), compute, result_of(gate, rows, seconds))
        counters["dss_requests"].inc(len(waits))
        counters["dss_rows"].inc(sum(rows))
        counters["dss_executions"].inc()
        for wait in waits:
            histograms["dss_queue_seconds"].observe(wait)
        histograms["dss_compute_seconds"].observe(compute)
        histograms["dss_gate_compute_seconds"].observe(gate)
        for expert, (scored, took) in enumerate(zip(rows, seconds, strict=True)):
            if scored:
                expert_rows.labels(**TINY, expert=expert).inc(scored)
                expert_seconds.labels(**TINY, expert=expert).observe(took)
    names = (*counters, *histograms, "dss_expert_rows", "dss_expert_compute_seconds")
    assert samples(ours, *names) == samples(theirs, *names)


def test_rejections_are_counted_by_model_and_reason(registry: CollectorRegistry) -> None:
    metrics = Metrics(registry)
    for model, reason in (("tiny", "queue-full"), ("tiny", "queue-full"), ("", "not-found")):
        metrics.rejected(model, reason)

    def rejected(model: str, reason: str) -> float | None:
        labels = {"model": model, "reason": reason}
        return registry.get_sample_value("dss_rejected_requests_total", labels)

    assert rejected("tiny", "queue-full") == 2
    assert rejected("", "not-found") == 1
    assert rejected("tiny", "not-found") is None


def test_statistics_charge_each_request_with_the_call_it_shared(model: ModelMetrics) -> None:
    before = time.time()
    model.executed([0.25, 0.5], 7, 0.125, result_of(0.0, [7, 0, 0], [0.1, 0.0, 0.0]))
    model.executed([0.0], 1, 0.5, result_of(0.0, [1, 0, 0], [0.1, 0.0, 0.0]))
    model.failed(0.75)
    found = model.statistics
    assert before <= found.last <= time.time()
    assert found == Statistics(
        last=found.last,
        requests=3,
        rows=8,
        executions=2,
        queue_seconds=0.75,
        request_seconds=0.125 * 2 + 0.5,
        failures=1,
        failure_seconds=0.75,
    )
