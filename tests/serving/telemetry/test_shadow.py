"""Rows compared with the full softmax beside the traffic: sampling, counting, a real server."""

import logging
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from helpers.fake_engine import FakeEngine
from helpers.server import running, wait_until
from helpers.tiny_bundle import N_CLASSES, WIDTH, rows_for, write_tiny
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from service.bundle import Bundle, read
from service.engine import Engine
from service.telemetry.metrics import shadow
from service.telemetry.metrics.shadow import DROPPED, HITS, ROWS, Shadow
from service.topk import TopK

RNG = np.random.default_rng(7)
HEAD = RNG.normal(size=(N_CLASSES, WIDTH)).astype(np.float32)
BIAS = RNG.normal(size=N_CLASSES).astype(np.float32)


class Shifted(FakeEngine):
    """Answers each row with the classes after those that the other fake names first."""

    def topk(self, hidden: NDArray[np.float32], k: int, experts: int = 1) -> TopK:
        found = super().topk(hidden, k, experts)
        return found._replace(classes=found.classes + 1)


def rows(count: int) -> NDArray[np.float32]:
    return np.arange(2 * count, dtype=np.float32).reshape(count, 2)


def compared(made: Shadow, counters: NDArray[np.float64], hidden: NDArray[np.float32]) -> None:
    made.offer(hidden, 1)
    wait_until(lambda: counters[ROWS] == len(hidden))
    made.close()


def test_hits_are_counted_at_each_number_of_places() -> None:
    engine = FakeEngine()
    counters = np.zeros(shadow.size(engine))
    made = Shadow(engine, Shifted(), counters, rate=1.0, most_rows=100)
    compared(made, counters, rows(20))
    assert counters.tolist() == [20, 0, 0, 20 * 4, 20 * 9]
    assert {k for _, k, _ in engine.calls} == {10}


def test_rows_are_asked_for_with_their_own_number_of_experts() -> None:
    engine = FakeEngine()
    counters = np.zeros(shadow.size(engine))
    made = Shadow(engine, FakeEngine(), counters, rate=1.0, most_rows=100)
    made.offer(rows(2), 1)
    made.offer(rows(3), 4)
    wait_until(lambda: counters[ROWS] == 5)
    made.close()
    asked = dict.fromkeys((1, 4), 0)
    for count, _, experts in engine.calls:
        asked[experts] += count
    assert asked == {1: 2, 4: 3}


def test_a_model_with_few_classes_has_fewer_places() -> None:
    engine = FakeEngine(n_reachable=7)
    counters = np.zeros(shadow.size(engine))
    assert len(counters) == HITS + 2
    made = Shadow(engine, FakeEngine(n_reachable=7), counters, rate=1.0, most_rows=100)
    compared(made, counters, rows(3))
    assert counters.tolist() == [3, 0, 3, 15]


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_each_row_has_the_same_chance_whatever_its_batch(batch: int) -> None:
    engine, full = FakeEngine(), FakeEngine()
    counters = np.zeros(shadow.size(engine))
    made = Shadow(engine, full, counters, rate=0.1, most_rows=10**6)
    made._random.seed(1)
    for _ in range(0, 20_000, batch):
        made.offer(rows(batch), 1)
    taken = counters[ROWS] + len(made._waiting)
    made.close()
    assert abs(taken - 2000) < 250  # five standard deviations and what is under way


def test_what_cannot_be_kept_up_with_is_dropped_and_nobody_waits() -> None:
    full = FakeEngine()
    full.hold()
    counters = np.zeros(5)
    made = Shadow(FakeEngine(), full, counters, rate=1.0, most_rows=3)
    made.offer(rows(1), 1)
    assert full.entered.wait(30)
    made.offer(rows(10), 1)
    assert (counters[ROWS], counters[DROPPED]) == (0, 7)
    full.release.set()
    wait_until(lambda: counters[ROWS] == 4)
    made.close()


def test_a_failure_is_logged_and_the_next_rows_are_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    full = FakeEngine()
    full.failure = RuntimeError("broken")
    counters = np.zeros(5)
    made = Shadow(FakeEngine(), full, counters, rate=1.0, most_rows=3)
    with caplog.at_level(logging.ERROR):
        made.offer(rows(1), 1)
        wait_until(lambda: bool(caplog.records))
    full.failure = None
    compared(made, counters, rows(1))


def test_without_rows_there_is_no_thread() -> None:
    before = threading.active_count()
    made = Shadow(FakeEngine(), FakeEngine(), np.zeros(5), rate=1.0, most_rows=3)
    assert threading.active_count() == before
    made.close()


# --- the head in a bundle --------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_head_answers_as_the_full_softmax_does(
    precision: str, biased: bool, tmp_path: Path
) -> None:
    bias = BIAS if biased else None
    made = write_tiny(tmp_path / "1", head=HEAD, head_bias=bias, precision=precision)  # type: ignore[arg-type]
    assert made.manifest.format_version == 4 and made.head is not None
    hidden = RNG.normal(size=(50, WIDTH)).astype(np.float32)
    logits = hidden @ HEAD.T + (BIAS if biased else 0)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for backend in ("compiled", "onnx"):
        found = Engine(made.head, backend=backend).topk(hidden, N_CLASSES)  # type: ignore[arg-type]
        np.testing.assert_array_equal(found.classes[:, :3], np.argsort(-logits, axis=1)[:, :3])
        by_class = np.take_along_axis(expected, found.classes, axis=1)
        np.testing.assert_allclose(found.log_probs, by_class, atol=1e-4)


def test_a_head_is_not_even_looked_at_unless_it_is_asked_for(tmp_path: Path) -> None:
    made = write_tiny(tmp_path / "1", head=HEAD)
    (made.path / "head" / "weights.bin").write_bytes(b"damaged")
    assert read(made.path).head is None
    with pytest.raises(Exception, match=r"head/weights.bin has 7 bytes"):
        read(made.path, head=True)


def test_without_a_head_bundles_are_what_earlier_releases_read(tiny: Bundle) -> None:
    assert tiny.manifest.format_version == 2
    assert '"head"' not in (tiny.path / "manifest.json").read_text()


# --- a real server ---------------------------------------------------------------------------


def samples(url: str) -> dict[tuple[str, str], float]:
    """By name and the label `at`, of version 1."""
    text = httpx.get(f"{url}/metrics").text
    return {
        (sample.name, sample.labels.get("at", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("version") == "1"
    }


@pytest.mark.parametrize("workers", [1, 2])
def test_live_recall_of_a_real_server(workers: int, tmp_path: Path) -> None:
    made = write_tiny(tmp_path / "models" / "tiny" / "1", head=HEAD)
    assert made.head is not None
    engine, full = Engine(made), Engine(made.head)
    asked = rows_for(0, 1, 2, 0)
    served, best = engine.topk(asked, 10).classes, full.topk(asked, 10).classes
    expected = {
        str(at): float((served[:, :at, None] == best[:, None, :at]).sum()) / (at * len(asked))
        for at in (1, 5, 10)
    }
    env = {"DSS_SHADOW__RATE": "1", "DSS_WORKERS_FOLDER": str(tmp_path)}
    options = ("--workers", str(workers))
    with running(tmp_path / "models", tmp_path / "log", *options, env=env) as server:
        wait_until(lambda: ("dss_drift_window_rows", "") in samples(server.url))
        body = {"inputs": asked.tolist(), "k": 2}
        for _ in range(10):
            assert httpx.post(f"{server.url}/topk", json=body).status_code == 200
        wait_until(lambda: samples(server.url).get(("dss_shadow_rows_total", "")) == 40)
        found = samples(server.url)
        for at, recall in expected.items():
            assert found["dss_shadow_hits_total", at] == pytest.approx(recall * 40 * int(at))
            assert found["dss_shadow_recall_ratio", at] == pytest.approx(recall)
        assert found["dss_shadow_dropped_rows_total", ""] == 0
        assert found["dss_trained_recall_ratio", "1"] == 0.75
        assert found["dss_drift_window_rows", ""] == 40


def test_a_bundle_without_a_head_is_served_and_said(tmp_path: Path) -> None:
    write_tiny(tmp_path / "models" / "tiny" / "1")
    env = {"DSS_SHADOW__RATE": "0.5"}
    with running(tmp_path / "models", tmp_path / "log", env=env) as server:
        assert "ships no head" in server.log.read_text()
        body = {"inputs": rows_for(0).tolist(), "k": 1}
        assert httpx.post(f"{server.url}/topk", json=body).status_code == 200
        assert ("dss_shadow_rows_total", "") not in samples(server.url)
