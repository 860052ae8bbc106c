"""What is counted of promises: by the shadow check, over workers; and when drift withdraws one."""

from pathlib import Path

import numpy as np
import pytest
from helpers.fake_engine import CONTRACT, FakeEngine
from helpers.server import wait_until
from helpers.tiny_bundle import rows_for, write_tiny
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from service.engine import Engine
from service.shared_state.counters import SharedCounters
from service.telemetry.metrics import shadow
from service.telemetry.metrics.registry import Metrics
from service.telemetry.metrics.shadow import (
    ALLOWED,
    CHECKED,
    CONTRACT_ROWS,
    CONTRACT_SIZE,
    MISSED,
    ROWS,
    Shadow,
)
from service.topk import SPARSE, Mode, TopK

TINY = {"model": "tiny", "version": "1"}
RECALL = Mode(recall=0.9)


class Shifted(FakeEngine):
    """Answers with the classes after those that the other fake names first: of k, one is missed."""

    def topk(
        self, hidden: NDArray[np.float32], k: int, experts: int = 1, mode: Mode = SPARSE
    ) -> TopK:
        found = super().topk(hidden, k, experts, mode)
        return found._replace(classes=found.classes + 1)


def rows(count: int) -> NDArray[np.float32]:
    return np.arange(2 * count, dtype=np.float32).reshape(count, 2)


def test_misses_are_counted_with_the_rows_own_k_and_mode() -> None:
    engine, full = FakeEngine(contract=CONTRACT), Shifted()
    plain, contract = np.zeros(shadow.size(engine)), np.zeros(CONTRACT_SIZE)
    made = Shadow(engine, full, plain, rate=1.0, most_rows=100, contract_counters=contract)
    made.offer(rows(20), 4, 1, RECALL)
    made.offer(rows(7), 4, 1, SPARSE)
    made.offer(rows(9), 4, 1, Mode(exact=True))
    wait_until(lambda: contract[CONTRACT_ROWS] == 20 and plain[ROWS] == 7)
    made.close()
    assert contract[CHECKED] == 20 * 4
    assert contract[MISSED] == 20
    assert contract[ALLOWED] == pytest.approx(20 * 4 * 0.1)
    asked = {(k, mode) for (_, k, _), mode in zip(engine.calls, engine.modes, strict=True)}
    assert asked == {(4, RECALL), (10, SPARSE)}, "exact rows are not asked again"


def test_an_engine_may_be_compared_with_its_own_scan() -> None:
    engine = FakeEngine(contract=CONTRACT)
    counters = np.zeros(shadow.size(engine))
    exact = Mode(exact=True)
    made = Shadow(engine, engine, counters, rate=1.0, most_rows=100, full_mode=exact)
    made.offer(rows(3), 4, 1)
    wait_until(lambda: counters[ROWS] == 3)
    made.close()
    assert set(engine.modes) == {SPARSE, exact}


def test_workers_add_up(tmp_path: Path) -> None:
    (tmp_path / "counters").mkdir()
    made = write_tiny(tmp_path / "bundle")
    registries = [CollectorRegistry(), CollectorRegistry()]
    workers = [
        Metrics(registry, SharedCounters(tmp_path / "counters", number))
        for number, registry in enumerate(registries)
    ]
    models = [metrics.model("tiny", 1, made, shadow_size=5, modes=True) for metrics in workers]
    for model in models:
        model.answered(RECALL, np.array([0, 1, 1], np.uint8))
        model.answered(Mode(exact=True), np.array([2], np.uint8))
        model.promises.withdrew(4)
        model.promises.contract[[CONTRACT_ROWS, CHECKED, MISSED, ALLOWED]] = 3, 30, 2, 0.5
    expected = {
        "dss_contract_rows_total": 6,
        "dss_contract_withdrawn_rows_total": 8,
        "dss_contract_checked_rows_total": 6,
        "dss_contract_checked_total": 60,
        "dss_contract_misses_total": 4,
        "dss_contract_allowed_misses_total": 1,
    }
    for registry in registries:
        found = {name: registry.get_sample_value(name, TINY) for name in expected}
        assert found == expected
        for rung, count in {"escalated": 4, "exact": 2}.items():
            labels = {**TINY, "rung": rung}
            assert registry.get_sample_value("dss_answered_rows_total", labels) == count
    for metrics, model in zip(workers, models, strict=True):
        metrics.forget(model)
    assert not list((tmp_path / "counters").glob("*.counters")) or all(
        block.key[0] not in ("answered", "withdrawn", "contract")
        for block in workers[0].counters.blocks()
    )


def test_scans_count_in_the_speedup(tmp_path: Path) -> None:
    """12 classes, 3 experts; the first holds 5."""
    made = write_tiny(tmp_path / "bundle")
    model = Metrics(CollectorRegistry()).model("tiny", 1, made, modes=True)
    found = Engine(made).topk(rows_for(0, 0), 1)
    model.executed([0.0], 2, 0.001, found)
    assert model.flops_speedup() == pytest.approx(12 / (5 + 3))
    model.answered(RECALL, np.array([0, 1], np.uint8))
    assert model.flops_speedup() == pytest.approx(12 / (5 + 12 / 2 + 3))


def test_drift_above_its_alert_withdraws_promises_until_it_is_gone(
    tiny_engine: Engine, tmp_path: Path
) -> None:
    metrics = Metrics(CollectorRegistry())
    model = metrics.model("tiny", 1, write_tiny(tmp_path / "1"))  # trained on 50, 25 and 25%

    def answer(*counts: int) -> None:
        asked = rows_for(*np.repeat(range(3), counts))
        model.executed([0.0], len(asked), 0.001, tiny_engine.topk(asked, 1))

    metrics.look(0.0)
    assert not model.drift.shifted
    answer(900, 0, 0)
    metrics.look(20.0)
    assert not model.drift.shifted, "too few rows to tell"
    answer(900, 0, 0)
    metrics.look(40.0)
    assert model.drift.shifted
    for now in range(60, 800, 20):  # what was counted is forgotten in time
        metrics.look(float(now))
    answer(1000, 500, 500)
    metrics.look(820.0)
    assert not model.drift.shifted
