"""What a client sees: `dss serve` in a process of its own, the real engine, real HTTP."""

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from helpers.npy_bytes import npy_bytes
from helpers.server import Running, running
from helpers.tiny_bundle import N_CLASSES, WIDTH, rows_for
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from service import bundle
from service.engine import Engine

JSON = {"content-type": "application/json"}
NPY = {"content-type": "application/x-npy"}
ROW = [0.5] * WIDTH


# --- answers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(models: Path) -> Engine:
    """The same bundle that the server calls tiny/2, asked directly."""
    return Engine(bundle.read(models / "tiny" / "2"))


def test_json_is_answered_as_the_engine_does(http: httpx.Client, engine: Engine) -> None:
    rows = rows_for(0, 1, 2)
    body = {"inputs": rows.tolist(), "k": 7, "experts": 2}
    answer = http.post("/topk", json=body).json()
    expected = engine.topk(rows, 7, 2)
    assert list(answer) == [
        "model", "version", "classes", "log_probs", "labels", "experts", "gates",
    ]  # fmt: skip
    assert (answer["model"], answer["version"]) == ("tiny", 2)
    assert answer["classes"] == expected.classes.tolist()
    assert answer["experts"] == [0, 1, 2]
    assert answer["labels"] == [[f"class {c}" for c in row] for row in answer["classes"]]
    np.testing.assert_allclose(answer["log_probs"], expected.log_probs, rtol=1e-5)
    np.testing.assert_allclose(answer["gates"], expected.gates, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<f2"])
def test_npy_in_and_out(http: httpx.Client, engine: Engine, dtype: str) -> None:
    rows = rows_for(2, 0)
    response = http.post(
        "/topk?k=4&experts=2",
        content=npy_bytes(rows.astype(dtype)),
        headers=NPY | {"accept": "application/x-npy"},
    )
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/x-npy"
    assert (response.headers["dss-model"], response.headers["dss-model-version"]) == ("tiny", "2")
    records = np.load(io.BytesIO(response.content), allow_pickle=False)
    expected = engine.topk(rows, 4, 2)
    np.testing.assert_array_equal(records["classes"], expected.classes)
    np.testing.assert_array_equal(records["experts"], expected.experts)
    np.testing.assert_allclose(records["log_probs"], expected.log_probs, rtol=1e-5)


def test_k_is_ten_unless_said(http: httpx.Client) -> None:
    answer = http.post("/topk", json={"inputs": rows_for(0).tolist()}).json()
    assert len(answer["classes"][0]) == 10
    answer = http.post("/topk", content=npy_bytes(rows_for(0)), headers=NPY).json()
    assert len(answer["classes"][0]) == 10


@pytest.mark.parametrize(
    ("path", "model", "version"),
    [
        ("/topk", "tiny", 2),
        ("/models/tiny/topk", "tiny", 2),
        ("/models/tiny/versions/1/topk", "tiny", 1),
        ("/models/tiny/versions/2/topk", "tiny", 2),
        ("/models/plain/topk", "plain", 1),
    ],
)
def test_paths_choose_models(http: httpx.Client, path: str, model: str, version: int) -> None:
    answer = http.post(path, json={"inputs": rows_for(0).tolist(), "k": 1}).json()
    assert (answer["model"], answer["version"]) == (model, version)
    assert ("labels" in answer) == (model == "tiny")


def test_concurrent_requests_get_their_own_answers(server: Running, engine: Engine) -> None:
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(1 + i % 3, WIDTH)).astype(np.float32) for i in range(120)]

    with httpx.Client(base_url=server.url, timeout=30) as client, ThreadPoolExecutor(12) as threads:

        def ask(rows: NDArray[np.float32]) -> dict[str, Any]:
            response = client.post("/topk", json={"inputs": rows.tolist(), "k": 6})
            assert response.status_code == 200
            answer: dict[str, Any] = response.json()
            return answer

        answers = list(threads.map(ask, batches))
    for rows, answer in zip(batches, answers, strict=True):
        assert answer["classes"] == engine.topk(rows, 6).classes.tolist()


# --- what is loaded --------------------------------------------------------------------------


def test_models_are_listed_with_what_was_refused(http: httpx.Client) -> None:
    plain, tiny = http.get("/models").json()["models"]
    assert (plain["name"], plain["default"], plain["version"]) == ("plain", False, 1)
    assert (tiny["name"], tiny["default"], tiny["version"]) == ("tiny", True, 2)
    assert [version["version"] for version in tiny["versions"]] == [2, 1]
    assert tiny["versions"][0]["n_classes"] == N_CLASSES
    (refused,) = tiny["refused"]
    assert refused["version"] == 3
    assert "labels.txt" in refused["reason"]
    assert http.get("/models/tiny").json()["name"] == "tiny"


def test_probes_docs_and_root(http: httpx.Client) -> None:
    for path in ("/livez", "/readyz", "/startupz"):
        assert http.get(path).json() == {"status": "ok"}
    assert "swagger" in http.get("/docs").text
    assert "page/app.js" in http.get("/").text


# --- metrics ---------------------------------------------------------------------------------


def samples(client: httpx.Client) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_known_rows_are_counted_exactly(models: Path, tmp_path: Path) -> None:
    with (
        running(models, tmp_path / "log", "--default-model", "tiny") as server,
        httpx.Client(base_url=server.url) as client,
    ):
        before = samples(client)
        assert not [name for name, _ in before if name == "dss_flops_speedup_ratio"]

        client.post("/topk", json={"inputs": rows_for(0, 0, 1).tolist(), "k": 2})
        client.post("/topk?k=1", content=npy_bytes(rows_for(2)), headers=NPY)
        client.post("/models/tiny/versions/1/topk", json={"inputs": rows_for(1).tolist(), "k": 1})
        # k = 5 fits expert 0 (5 classes); expert 1 has 4, so its next best expert helps out.
        client.post("/topk", json={"inputs": rows_for(0, 1).tolist(), "k": 5})
        client.post("/topk", json={"inputs": [[1.0]]})
        client.post("/topk", content=b"{", headers=JSON)
        client.post("/models/nobody/topk", json={"inputs": [ROW]})
        client.get("/nowhere/1")
        client.get("/nowhere/2")
        client.get("/models/tiny")

        after = samples(client)

        def value(name: str, **labels: str) -> float:
            return after[name, frozenset(labels.items())]

        tiny2 = {"model": "tiny", "version": "2"}
        tiny1 = {"model": "tiny", "version": "1"}
        assert value("dss_requests_total", **tiny2) == 3
        assert value("dss_rows_total", **tiny2) == 6
        assert value("dss_executions_total", **tiny2) == 3
        assert value("dss_requests_total", **tiny1) == value("dss_rows_total", **tiny1) == 1
        assert value("dss_queue_seconds_count", **tiny2) == 3
        assert value("dss_compute_seconds_count", **tiny2) == 3
        assert value("dss_gate_compute_seconds_count", **tiny2) == 3
        assert value("dss_queue_rows", **tiny2) == 0

        scored = [value("dss_expert_rows_total", **tiny2, expert=str(e)) for e in range(3)]
        assert sum(scored) == 7  # six rows, one of which needed a second expert
        assert scored[1] == 2
        runs = [value("dss_expert_compute_seconds_count", **tiny2, expert=str(e)) for e in range(3)]
        assert sum(runs) == 5  # an expert that was searched twice in a call counts once
        utilization = [
            value("dss_expert_utilization_ratio", **tiny2, expert=str(e)) for e in range(3)
        ]
        assert utilization == pytest.approx([rows / 6 for rows in scored])
        sizes = [value("dss_expert_classes", **tiny2, expert=str(e)) for e in range(3)]
        assert sizes == [5, 4, 4]
        live = N_CLASSES / (sum(s * u for s, u in zip(sizes, utilization, strict=True)) + 3)
        assert value("dss_flops_speedup_ratio", **tiny2) == pytest.approx(live)
        assert value("dss_trained_flops_speedup_ratio", **tiny2) == pytest.approx(12 / 7.5)
        assert value("dss_refused_bundles", model="tiny", version="3") == 1

        def rejected(model: str, reason: str) -> float:
            return value("dss_rejected_requests_total", model=model, reason=reason)

        assert rejected("tiny", "wrong_width") == 1
        assert rejected("tiny", "malformed_body") == 1
        assert rejected("", "model_not_found") == 1

        def answered(route: str, method: str, status: int) -> float:
            return value("dss_http_requests_total", route=route, method=method, status=str(status))

        assert answered("/topk", "POST", 200) == 3
        assert answered("/topk", "POST", 422) == 1
        assert answered("/topk", "POST", 400) == 1
        assert answered("/models/{name}/topk", "POST", 404) == 1
        assert answered("/models/{name}/versions/{version}/topk", "POST", 200) == 1
        assert answered("unmatched", "GET", 404) == 2
        assert value("dss_http_request_seconds_count", route="/topk") == 5

        experts = client.get("/models/tiny/experts").json()
        assert (experts["model"], experts["version"]) == ("tiny", 2)
        assert [expert["classes"] for expert in experts["experts"]] == [5, 4, 4]
        assert [expert["rows"] for expert in experts["experts"]] == scored
        assert [expert["utilization"] for expert in experts["experts"]] == utilization
        assert [expert["trained_utilization"] for expert in experts["experts"]] == [0.5, 0.25, 0.25]
        assert all(expert["mean_seconds"] > 0 for expert in experts["experts"])
        idle = client.get("/models/plain/experts").json()["experts"][0]
        assert (idle["rows"], idle["utilization"], idle["mean_seconds"]) == (0, None, None)
