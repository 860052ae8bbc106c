"""What a client sees: `dss serve` in a process of its own, the real engine, real HTTP."""

import io
import pickle
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from helpers.server import Running, running, wait_until
from helpers.tiny_bundle import N_CLASSES, WIDTH, rows_for
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from service import bundle
from service.engine import Engine

JSON = {"content-type": "application/json"}
NPY = {"content-type": "application/x-npy"}


def npy_bytes(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def assert_problem(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert set(problem) == {"type", "title", "status", "detail", "instance"}
    assert problem["status"] == status
    assert "Traceback" not in response.text
    return problem


def assert_answers(client: httpx.Client) -> None:
    response = client.post("/topk", json={"inputs": rows_for(1).tolist(), "k": 1})
    assert response.status_code == 200
    assert response.json()["experts"] == [1]


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


# --- bad input -------------------------------------------------------------------------------

ROW = [0.5] * WIDTH


def json_body(inputs: object, **more: object) -> bytes:
    return orjson.dumps({"inputs": inputs, **more})


def forged_npy(shape: str) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(16)


OBJECTS = npy_bytes(np.array([[{"a": 1}]], object))

BAD: dict[str, tuple[int, bytes, dict[str, str]]] = {
    "not json": (400, b"not json", JSON),
    "empty body": (400, b"", JSON),
    "cut json": (400, json_body([ROW])[:-3], JSON),
    "json nan": (400, b'{"inputs": [[NaN, 1, 2, 3]]}', JSON),
    "ragged rows": (422, json_body([ROW, ROW[:2]]), JSON),
    "strings": (422, json_body([["1", "2", "3", "4"]]), JSON),
    "nulls": (422, json_body([[1, None, 3, 4]]), JSON),
    "booleans": (422, json_body([[1, True, 3, 4]]), JSON),
    "empty batch": (422, json_body([]), JSON),
    "empty row": (422, json_body([[]]), JSON),
    "flat row": (422, json_body(ROW), JSON),
    "wrong width": (422, json_body([ROW[:3]]), JSON),
    "too big for float32": (422, json_body([[1e39, 0, 0, 0]]), JSON),
    "no inputs": (422, b"{}", JSON),
    "unknown key": (422, json_body([ROW], temperature=1), JSON),
    "not an object": (422, b"[1]", JSON),
    "k zero": (422, json_body([ROW], k=0), JSON),
    "k too large": (422, json_body([ROW], k=N_CLASSES + 1), JSON),
    "k beyond the limit": (422, json_body([ROW], k=10**15), JSON),
    "k a string": (422, json_body([ROW], k="3"), JSON),
    "experts zero": (422, json_body([ROW], experts=0), JSON),
    "experts too many": (422, json_body([ROW], experts=4), JSON),
    "10 MB of json": (413, b" " * 10_000_000, JSON),
    "10 MB of npy": (413, npy_bytes(np.zeros((625_000, WIDTH), np.float32)), NPY),
    "too many rows": (413, npy_bytes(np.zeros((4097, WIDTH), np.float32)), NPY),
    "integers": (422, npy_bytes(np.ones((1, WIDTH), np.int32)), NPY),
    "npy nan": (422, npy_bytes(np.full((1, WIDTH), np.nan, np.float32)), NPY),
    "npy infinity": (422, npy_bytes(np.full((1, WIDTH), np.inf, np.float32)), NPY),
    "npy vector": (422, npy_bytes(np.ones(WIDTH, np.float32)), NPY),
    "npy fortran": (422, npy_bytes(np.asfortranarray(np.ones((2, WIDTH), np.float32))), NPY),
    "npy objects": (422, OBJECTS, NPY),
    "pickle": (400, pickle.dumps([ROW]), NPY),
    "npy giant shape": (400, forged_npy("(1000000000000, 4)"), NPY),
    "npy negative shape": (400, forged_npy("(-1, 4)"), NPY),
    "npy wrong bytes": (400, forged_npy("(2, 4)"), NPY),
    "json called npy": (400, json_body([ROW]), NPY),
    "npy called json": (400, npy_bytes(np.ones((1, WIDTH), np.float32)), JSON),
    "no content type": (415, json_body([ROW]), {}),
    "form": (415, b"inputs=1", {"content-type": "application/x-www-form-urlencoded"}),
    "not gzip": (400, json_body([ROW]), JSON | {"content-encoding": "gzip"}),
    "brotli": (415, json_body([ROW]), JSON | {"content-encoding": "br"}),
    "accept html": (406, json_body([ROW]), JSON | {"accept": "text/html"}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_problem_and_the_service_goes_on(http: httpx.Client, name: str) -> None:
    status, content, headers = BAD[name]
    problem = assert_problem(http.post("/topk", content=content, headers=headers), status)
    assert problem["instance"] == "/topk"
    assert problem["detail"].endswith(".")
    assert_answers(http)


@pytest.mark.parametrize(
    "path",
    [
        "/models/nobody/topk",
        "/models/tiny/versions/7/topk",
        "/models/tiny/versions/3/topk",
        "/models/tiny/versions/x/topk",
        "/models/%2e%2e/topk",
        "/models/..%2f..%2fetc/topk",
        "/models/tiny/versions/1/topk/",
        "/nothing",
        "/topk/",
    ],
)
def test_unknown_models_and_paths_are_404(http: httpx.Client, path: str) -> None:
    assert_problem(http.post(path, json={"inputs": [ROW]}), 404)
    assert_answers(http)


@pytest.mark.parametrize("path", ["/models/nobody", "/models/nobody/experts", "/nothing"])
def test_unknown_resources_are_404(http: httpx.Client, path: str) -> None:
    assert_problem(http.get(path), 404)


def test_a_wrong_method_is_405(http: httpx.Client) -> None:
    response = http.get("/topk")
    assert_problem(response, 405)
    assert response.headers["allow"] == "POST"
    assert_problem(http.post("/livez"), 405)
    both = http.options("/v2/logging")
    assert (both.status_code, both.headers["allow"]) == (405, "GET, POST")


@pytest.mark.parametrize("query", ["k=x", "k=1&k=2", "k=", "inputs=1", "colour=red", "k=0"])
def test_wrong_query_strings_are_422(http: httpx.Client, query: str) -> None:
    content = npy_bytes(rows_for(0))
    assert_problem(http.post(f"/topk?{query}", content=content, headers=NPY), 422)
    assert_answers(http)


def test_a_json_body_with_a_query_string_is_422(http: httpx.Client) -> None:
    assert_problem(http.post("/topk?k=3", json={"inputs": [ROW]}), 422)


def test_a_chunked_body_is_cut_off_at_the_limit(http: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b" " * 65_536

    assert_problem(http.post("/topk", content=endless(), headers=JSON), 413)
    assert_answers(http)


def raw_exchange(server: Running, request: bytes) -> bytes:
    """Send bytes as they are, and read until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def test_an_announced_giant_is_refused_before_it_comes(server: Running, http: httpx.Client) -> None:
    head = (
        b"POST /topk HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1000000000000\r\nExpect: 100-continue\r\n\r\n"
    )
    answer = raw_exchange(server, head)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"application/problem+json" in answer
    assert_answers(http)


@pytest.mark.parametrize("length", [b"-1", b"x", b"9" * 50])
def test_a_nonsense_length_is_a_client_error(
    server: Running, http: httpx.Client, length: bytes
) -> None:
    head = b"POST /topk HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    answer = raw_exchange(server, head + b"Content-Length: " + length + b"\r\n\r\n{}")
    assert answer.startswith(b"HTTP/1.1 4")
    assert_answers(http)


def test_a_client_that_leaves_halfway_harms_nobody(server: Running, http: httpx.Client) -> None:
    head = b"POST /topk HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(head + b'Content-Length: 100\r\n\r\n{"inputs"')
    assert_answers(http)
    assert "Traceback" not in server.log.read_text()


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


# --- stopping --------------------------------------------------------------------------------


def test_sigterm_fails_readiness_first_and_goes_on_answering(models: Path, tmp_path: Path) -> None:
    body = json_body(rows_for(0).tolist(), k=1)
    head = f"POST /topk HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
    head += b"Content-Type: application/json\r\n\r\n"
    log = tmp_path / "log"
    with running(models, log, "--default-model", "tiny", "--drain-seconds", "60") as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(head + body[:10])
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("/readyz", 503)  # balancers are told first ...
            assert httpx.get(server.url + "/livez").status_code == 200
            with httpx.Client(base_url=server.url) as client:
                assert_answers(client)  # ... while requests are still answered
            assert server.process.poll() is None
            connection.sendall(body[10:])
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
        assert server.process.poll() is None


def test_sigterm_finishes_what_is_under_way_and_exits_0(models: Path, tmp_path: Path) -> None:
    body = json_body(rows_for(0).tolist(), k=1)
    head = f"POST /topk HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
    head += b"Content-Type: application/json\r\n\r\n"
    log = tmp_path / "log"
    with running(models, log, "--default-model", "tiny", "--drain-seconds", "0") as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(head + body[:10])
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "Shutting down" in log.read_text())
            connection.sendall(body[10:])
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
        assert server.process.wait(30) == 0
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_idle_server_stops_with_0(models: Path, tmp_path: Path, sign: signal.Signals) -> None:
    with running(models, tmp_path / "log", env={"DSS_DRAIN_SECONDS": "0"}) as server:
        server.process.send_signal(sign)
        assert server.process.wait(30) == 0
