"""How far live traffic is from training's: the index, the window, and what /metrics shows."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_bundle import rows_for, write_tiny
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from service.bundle.manifest import GateFacts
from service.engine import Engine
from service.shared_state.counters import Block, Key, SharedCounters
from service.telemetry.metrics.drift import LEAST_ROWS, Window, stability_index
from service.telemetry.metrics.model import ModelMetrics
from service.telemetry.metrics.registry import Metrics

TINY = {"model": "tiny", "version": "1"}
SHARES = np.array([0.5, 0.25, 0.25])  # what the tiny bundle's training says


def test_a_hand_worked_index() -> None:
    """0.6, 0.2, 0.2 against 0.5, 0.25, 0.25: 0.1 ln 1.2 + 2 * 0.05 ln 1.25."""
    found = stability_index(np.array([6e6, 2e6, 2e6]), SHARES)
    assert found == pytest.approx(0.1 * np.log(1.2) + 0.1 * np.log(1.25), rel=1e-5)


@given(st.lists(st.integers(0, 10_000), min_size=3, max_size=3).filter(lambda c: sum(c) >= 1000))
def test_the_index_is_a_distance(counts: list[int]) -> None:
    live = np.array(counts, float)
    found = stability_index(live, SHARES)
    assert found is not None and np.isfinite(found) and found >= 0
    assert stability_index(live, live) == pytest.approx(0, abs=1e-12)


def test_too_few_rows_tell_nothing() -> None:
    assert stability_index(SHARES * (LEAST_ROWS - 1), SHARES) is None
    many = np.ones(100)
    assert stability_index(many * 19, many) is None
    assert stability_index(many * 20, many) == pytest.approx(0)


def test_an_expert_that_training_never_saw_is_a_shift_and_not_infinite() -> None:
    found = stability_index(np.array([500.0, 500.0]), np.array([1.0, 0.0]))
    assert found is not None and 2 < found < 20


def test_a_window_forgets() -> None:
    window = Window(30.0, 0.0, np.array([0.0]))
    for now in range(10, 100, 10):
        assert window.is_due(float(now))
        window.look(float(now), np.array([float(now)]))  # one each second
        assert not window.is_due(now + 9.9)
    assert window.since(np.array([95.0])).tolist() == [35.0]  # a step too long at most
    assert Window(30.0, 0.0, np.array([5.0])).since(np.array([3.0])).tolist() == [0.0]


# --- as /metrics shows it --------------------------------------------------------------------


def traffic(model: ModelMetrics, engine: Engine, counts: tuple[int, int, int]) -> None:
    """Rows for each expert, each in two calls, one of them with the recall dial at 2."""
    rows = rows_for(*np.repeat(range(3), counts))
    for searched, part in ((1, rows[::2]), (2, rows[1::2])):
        model.executed([0.0], len(part), 0.001, engine.topk(part, 1, searched))


def test_first_choices_count_whatever_the_dial_says(tiny_engine: Engine, tmp_path: Path) -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    model = metrics.model("tiny", 1, write_tiny(tmp_path / "1"))

    def shown(name: str) -> float | None:
        return registry.get_sample_value(name, TINY)

    assert shown("dss_drift_window_rows") is None  # before the first look there is no window
    metrics.look(0.0)
    assert (shown("dss_drift_window_rows"), shown("dss_utilization_drift_ratio")) == (0, None)
    traffic(model, tiny_engine, (1000, 500, 500))
    assert shown("dss_drift_window_rows") == 2000
    assert shown("dss_utilization_drift_ratio") == pytest.approx(0, abs=1e-9)
    assert shown("dss_gate_drift_ratio") is None, "the bundle says nothing of it"
    for now in range(1, 400):
        metrics.look(float(now))
    traffic(model, tiny_engine, (1000, 0, 0))
    assert shown("dss_drift_window_rows") == 1000, "what came before has been forgotten"
    drift = shown("dss_utilization_drift_ratio")
    assert drift is not None and drift > 1


def test_gate_values_are_compared(tiny_engine: Engine, tmp_path: Path) -> None:
    sure, unsure = rows_for(0), np.full((1, 4), 0.25, np.float32)
    values = [float(tiny_engine.topk(rows, 1).gates[0]) for rows in (sure, unsure)]
    assert values[1] < 0.5 < values[0]
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    facts = GateFacts(edges=[0.5], shares=[0.5, 0.5])
    model = metrics.model("tiny", 1, write_tiny(tmp_path / "1", gates=facts))
    metrics.look(0.0)

    def answer(rows: np.ndarray, times: int) -> float | None:  # type: ignore[type-arg]
        many = np.repeat(rows, times, axis=0)
        model.executed([0.0], times, 0.001, tiny_engine.topk(many, 1))
        return registry.get_sample_value("dss_gate_drift_ratio", TINY)

    assert answer(sure, 500) is None, "too few rows"
    assert answer(unsure, 500) == pytest.approx(0, abs=1e-9)
    shifted = answer(unsure, 9000)
    assert shifted == pytest.approx(0.45 * np.log(0.95 / 0.05), rel=0.01)


def test_workers_are_one_traffic(tiny_engine: Engine, tmp_path: Path) -> None:
    made = write_tiny(tmp_path / "bundle")
    (tmp_path / "counters").mkdir()
    registries = [CollectorRegistry(), CollectorRegistry()]
    workers = [
        Metrics(registry, SharedCounters(tmp_path / "counters", number))
        for number, registry in enumerate(registries)
    ]
    models = [worker.model("tiny", 1, made) for worker in workers]
    for worker in workers:
        worker.look(0.0)
    traffic(models[0], tiny_engine, (1000, 0, 0))
    traffic(models[1], tiny_engine, (0, 500, 500))
    for registry in registries:
        assert registry.get_sample_value("dss_drift_window_rows", TINY) == 2000
        drift = registry.get_sample_value("dss_utilization_drift_ratio", TINY)
        assert drift == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    "gates",
    [
        {"edges": [0.5, 0.5], "shares": [0.3, 0.3, 0.4]},
        {"edges": [0.5], "shares": [1.0]},
        {"edges": [0.5], "shares": [0.5, -0.5]},
        {"edges": [i / 20 for i in range(1, 11)], "shares": [1 / 11] * 11},
    ],
)
def test_gate_facts_that_make_no_sense_are_refused(gates: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError):
        GateFacts.model_validate(gates)


def test_counts_are_read_once_however_many_models_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics(CollectorRegistry(), SharedCounters(tmp_path, 0, 1))
    made = write_tiny(tmp_path / "bundle")
    for number in range(5):
        metrics.model(f"m{number}", 1, made)
    read, blocks = list[object](), SharedCounters.blocks

    def counted(self: SharedCounters, key: Key | None = None) -> Iterator[Block]:
        read.append(key)
        return blocks(self, key)

    monkeypatch.setattr(SharedCounters, "blocks", counted)
    metrics.look(0.0)
    assert read == [None]
    metrics.look(1.0)
    assert read == [None], "it is not yet time for another sample"
    generate_latest(metrics.registry)
    assert read == [None, None]
