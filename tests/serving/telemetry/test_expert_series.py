"""Which experts have series of their own in /metrics, and that the others stay counted."""

from pathlib import Path

import numpy as np
import pytest
from helpers.fake_engine import result_of
from helpers.tiny_bundle import SIZES, write_tiny
from prometheus_client import CollectorRegistry

from service import settings
from service.bundle import Bundle
from service.settings import SettingsError
from service.shared_state.counters import SharedCounters
from service.telemetry.metrics.expert_series import ExpertSeries
from service.telemetry.metrics.registry import Metrics

TINY = {"model": "tiny", "version": "1"}


def shown(registry: CollectorRegistry, name: str) -> dict[str, float]:
    """By expert."""
    return {
        sample.labels["expert"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def folded(utilization: list[float], most: int | None, values: list[float]) -> dict[str, float]:
    series = ExpertSeries(utilization, most).of(np.array(values))
    return {name: float(value) for name, value in series}


def test_experts_that_training_used_most_have_their_own_series() -> None:
    used = [0.1, 0.4, 0.1, 0.3, 0.1]
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert folded(used, 2, values) == {"1": 2, "3": 8, "other": 21}
    assert folded(used, 3, values) == {"0": 1, "1": 2, "3": 8, "other": 20}, "ties: lower numbers"
    assert folded(used, 0, values) == {"other": 31}
    for all_of_them in (5, 6, None):
        assert folded(used, all_of_them, values) == dict(zip("01234", values, strict=True))


def test_what_a_replaced_version_counted_of_further_experts_is_not_lost() -> None:
    assert folded([0.5, 0.5], None, [1.0, 2.0, 4.0]) == {"0": 1, "1": 2, "other": 4}
    assert folded([0.2, 0.5, 0.3], None, [1.0, 2.0]) == {"0": 1, "1": 2}


@pytest.mark.parametrize("most", [0, 1, 2, 3, None])
def test_sums_over_experts_are_the_totals(tiny: Bundle, most: int | None) -> None:
    registry = CollectorRegistry()
    model = Metrics(registry).model("tiny", 1, tiny, own_series=most)
    model.executed([0.0], 8, 0.001, result_of(0.0, [1, 2, 5], [0.5, 0.25, 0.125]))
    sums = {
        "dss_expert_rows_total": 8,
        "dss_expert_compute_seconds_sum": 0.875,
        "dss_expert_compute_seconds_count": 3,
        "dss_expert_classes": sum(SIZES),
        "dss_expert_utilization_ratio": 1,
        "dss_trained_expert_utilization_ratio": 1,
    }
    for name, total in sums.items():
        found = shown(registry, name)
        assert sum(found.values()) == pytest.approx(total), name
        assert len(found) == (3 if most in (2, 3, None) else most + 1)
    assert "other" not in shown(registry, "dss_expert_cost_rows"), "a sum of costs costs no row"
    # 12 / (5 * 1/8 + 4 * 2/8 + 4 * 5/8 + 3), whatever is shown of each
    assert registry.get_sample_value("dss_scored_classes_total", TINY) == 5 + 8 + 20
    speedup = registry.get_sample_value("dss_flops_speedup_ratio", TINY)
    assert speedup == pytest.approx(12 / (33 / 8 + 3))


def test_no_counter_goes_down_when_traffic_moves_to_other_experts(tiny: Bundle) -> None:
    registry = CollectorRegistry()
    model = Metrics(registry).model("tiny", 1, tiny, own_series=1)
    before = shown(registry, "dss_expert_rows_total")
    assert before == {"0": 0, "other": 0}
    for rows in ([9, 1, 0], [0, 0, 50], [0, 70, 0], [1, 0, 90]):
        model.executed([0.0], sum(rows), 0.001, result_of(0.0, rows, [0.0, 0.0, 0.0]))
        now = shown(registry, "dss_expert_rows_total")
        assert now.keys() == before.keys()
        assert all(now[expert] >= before[expert] for expert in now)
        before = now
    assert before == {"0": 10, "other": 211}


def test_every_worker_and_its_successor_show_the_same_experts(tiny: Bundle, tmp_path: Path) -> None:
    def start(number: int) -> tuple[CollectorRegistry, Metrics]:
        registry = CollectorRegistry()
        return registry, Metrics(registry, SharedCounters(tmp_path, number, 2))

    for number in (0, 1, 0):  # the third goes on from the first one's counts
        registry, metrics = start(number)
        model = metrics.model("tiny", 1, tiny, own_series=1)
        model.executed([0.0], 3, 0.001, result_of(0.0, [0, 1, 2], [0.0, 0.0, 0.0]))
    assert shown(registry, "dss_expert_rows_total") == {"0": 0, "other": 9}


def test_experts_of_a_version_that_only_another_worker_has_loaded_are_not_shown_yet(
    tiny: Bundle, tmp_path: Path
) -> None:
    one = Metrics(CollectorRegistry(), SharedCounters(tmp_path, 0, 2))
    registry = CollectorRegistry()
    Metrics(registry, SharedCounters(tmp_path, 1, 2))
    model = one.model("tiny", 1, tiny, own_series=1)
    model.executed([0.0], 3, 0.001, result_of(0.0, [0, 1, 2], [0.0, 0.0, 0.0]))
    assert registry.get_sample_value("dss_rows_total", TINY) == 3
    assert shown(registry, "dss_expert_rows_total") == {}


def test_a_collapse_onto_experts_without_series_is_seen(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    model = metrics.model("tiny", 1, write_tiny(tmp_path / "1"), own_series=0)
    trained = registry.get_sample_value("dss_trained_effective_experts", TINY)
    assert trained == pytest.approx(np.exp(0.5 * np.log(2) + 2 * 0.25 * np.log(4)))
    metrics.look(0.0)
    assert registry.get_sample_value("dss_effective_experts", TINY) is None, "no row yet"
    all_on_one = result_of(0.0, [0, 0, 6], [0.0, 0.0, 0.0])
    rows = np.full(6, 2)
    all_on_one = all_on_one._replace(experts=rows, gates=np.ones(6, np.float32))
    model.executed([0.0], 6, 0.001, all_on_one)
    assert registry.get_sample_value("dss_effective_experts", TINY) == 1


def test_the_setting_takes_a_number_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.load({}).metrics.own_series == 100
    for given, own in (("0", 0), ("7", 7), ("all", None)):
        monkeypatch.setenv("DSS_METRICS__EXPERTS", given)
        assert settings.load({}).metrics.own_series == own
    for wrong in ("-1", "some"):
        monkeypatch.setenv("DSS_METRICS__EXPERTS", wrong)
        with pytest.raises(SettingsError, match=r"metrics\.experts"):
            settings.load({})
