"""The registry by itself; test_http.py reads the same counts from a live server."""

import pytest
from prometheus_client import CollectorRegistry
from tiny import SIZES, rows_for

from service.backend import ExpertRun, TopK
from service.bundle import Bundle
from service.engine import Engine
from service.metrics import Metrics, ModelMetrics

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
        "dss_queue_rows",
        "dss_queue_seconds",
        "dss_compute_seconds",
        "dss_gate_compute_seconds",
        "dss_expert_rows",
        "dss_expert_compute_seconds",
        "dss_expert_classes",
        "dss_expert_cost_rows",
        "dss_expert_utilization_ratio",
        "dss_flops_speedup_ratio",
        "dss_trained_flops_speedup_ratio",
        "dss_trained_expert_utilization_ratio",
        "dss_model_info",
        "dss_refused_bundles",
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
    assert model.flops_speedup is None
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
        runs = (ExpertRun(expert=1, rows=7, seconds=seconds),)
        result = TopK(answer.classes, answer.log_probs, answer.experts, answer.gates, 0.0, runs)
        model.executed([0.0], 7, 1.0, result)
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
