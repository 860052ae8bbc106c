"""The application in this process, with engines that can be held or broken; real HTTP around it."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from helpers.fake_engine import FakeEngine
from helpers.server import in_thread, wait_until
from helpers.tiny_bundle import WIDTH, write_tiny
from prometheus_client import CollectorRegistry

from service.bundle import Bundle
from service.engine import Engine
from service.http.app import create_app
from service.settings import Limits, Queue, Settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny(tmp_path / "models" / "tiny" / "1", labels=False)
    return tmp_path / "models"


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine(hidden_size=WIDTH)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def client(folder: Path, fake: FakeEngine, registry: CollectorRegistry) -> Iterator[httpx.Client]:
    settings = Settings(
        models=folder,
        limits=Limits(max_rows=4, max_k=50, max_answers=100),
        queue=Queue(max_rows=4),
    )
    app = create_app(settings, registry, lambda *_: fake)
    with in_thread(app) as client:
        wait_ready(client)
        yield client
        fake.release.set()


def wait_ready(client: httpx.Client) -> None:
    wait_until(lambda: client.get("/startupz").status_code == 200)


def ask(client: httpx.Client, *values: float, k: int = 1) -> httpx.Response:
    rows = [[value] + [0.0] * (WIDTH - 1) for value in values]
    return client.post("/topk", json={"inputs": rows, "k": k})


def assert_problem(response: httpx.Response, status: int, slug: str) -> None:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert set(problem) == {"type", "title", "status", "detail", "instance"}
    assert problem["type"] == (slug if slug == "about:blank" else f"urn:dss:problem:{slug}")
    assert problem["status"] == status
    assert problem["instance"] == response.request.url.raw_path.partition(b"?")[0].decode()


def test_requests_that_come_together_are_joined(
    client: httpx.Client, fake: FakeEngine, registry: CollectorRegistry
) -> None:
    fake.hold()
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(ask, client, 1000)
        fake.entered.wait(30)
        others = [threads.submit(ask, client, value, k=2) for value in (1, 2, 3)]
        labels = {"model": "tiny", "version": "1"}
        wait_until(lambda: registry.get_sample_value("dss_queue_rows", labels) == 3)
        fake.release.set()
        assert first.result().json()["classes"] == [[1000]]
        assert [other.result().json()["classes"] for other in others] == [
            [[1, 2]],
            [[2, 3]],
            [[3, 4]],
        ]
    assert fake.calls[-2:] == [(1, 1, 1), (3, 2, 1)]
    assert registry.get_sample_value("dss_requests_total", labels) == 4
    assert registry.get_sample_value("dss_executions_total", labels) == 2


def test_a_full_queue_is_429_at_once(
    client: httpx.Client, fake: FakeEngine, registry: CollectorRegistry
) -> None:
    fake.hold()
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(ask, client, 1)
        fake.entered.wait(30)
        waiting = threads.submit(ask, client, 2, 3, 4)
        labels = {"model": "tiny", "version": "1"}
        wait_until(lambda: registry.get_sample_value("dss_queue_rows", labels) == 3)
        refused = ask(client, 5, 6)
        assert_problem(refused, 429, "queue-full")
        assert refused.headers["retry-after"] == "1"
        fake.release.set()
        assert running.result().status_code == waiting.result().status_code == 200
    rejected = {"model": "tiny", "reason": "queue_full"}
    assert registry.get_sample_value("dss_rejected_requests_total", rejected) == 1
    assert ask(client, 5, 6).status_code == 200


def test_a_broken_engine_is_500_and_not_ready_until_it_answers(
    client: httpx.Client, fake: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    fake.failure = RuntimeError("a secret of the engine")
    response = ask(client, 1)
    assert_problem(response, 500, "engine-failed")
    assert "secret" not in response.text
    assert "a secret of the engine" in caplog.text  # with its trace, on the server's side
    assert_problem(client.get("/readyz"), 503, "not-ready")
    assert client.get("/livez").status_code == 200
    assert client.get("/startupz").status_code == 200
    fake.failure = None
    assert client.get("/readyz").status_code == 200
    assert ask(client, 1).status_code == 200


def test_a_crashed_engine_thread_is_500_and_not_ready_until_another_answers(
    client: httpx.Client, fake: FakeEngine
) -> None:
    fake.failure = SystemExit()
    assert_problem(ask(client, 1), 500, "engine-failed")
    assert_problem(client.get("/readyz"), 503, "not-ready")
    assert_problem(ask(client, 1), 500, "engine-failed")
    assert client.get("/livez").status_code == 200
    assert client.get("/startupz").status_code == 200
    fake.failure = None
    wait_until(lambda: client.get("/readyz").status_code == 200)
    assert ask(client, 1).status_code == 200


def test_an_unknown_failure_is_a_plain_500(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*_: object) -> None:
        raise ZeroDivisionError("a secret of the server")

    monkeypatch.setattr("service.http.inference.handler.check_limits", explode)
    response = ask(client, 1)
    assert_problem(response, 500, "about:blank")
    assert "secret" not in response.text
    assert "ZeroDivisionError: a secret of the server" in caplog.text
    monkeypatch.undo()
    assert ask(client, 1).status_code == 200


def test_limits(client: httpx.Client) -> None:
    assert_problem(ask(client, 1, 2, 3, 4, 5), 413, "too-many-rows")
    assert_problem(ask(client, 1, k=51), 422, "k-out-of-range")
    assert_problem(ask(client, 1, 2, 3, k=50), 413, "too-many-answers")
    assert ask(client, 1, 2, k=50).status_code == 200


def test_a_body_that_never_comes_is_408(folder: Path) -> None:
    app = create_app(Settings(models=folder, limits=Limits(body_seconds=0.05)))

    class Slow(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield b'{"inputs": '
            answered.wait(30)

    answered = threading.Event()
    with in_thread(app) as client:
        wait_ready(client)
        request = client.build_request(
            "POST", "/topk", headers={"content-type": "application/json"}
        )
        request = httpx.Request("POST", request.url, headers=request.headers, stream=Slow())
        del request.headers["content-length"]
        request.headers["transfer-encoding"] = "chunked"
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(client.send, request)
            labels = {"route": "/topk", "method": "POST", "status": "408"}
            registry = app.state.service.metrics.registry
            wait_until(
                lambda: registry.get_sample_value("dss_http_requests_total", labels) is not None
            )
            answered.set()
            assert_problem(future.result(), 408, "body-timeout")


def test_the_probes_while_loading_and_after(folder: Path) -> None:
    may_load = threading.Event()

    def slow_engine(bundle: Bundle, threads: int) -> Engine:
        may_load.wait(30)
        return Engine(bundle, threads)

    with in_thread(create_app(Settings(models=folder), engine_factory=slow_engine)) as client:
        assert client.get("/livez").status_code == 200
        for path in ("/startupz", "/readyz", "/models", "/models/tiny"):
            response = client.get(path)
            assert_problem(response, 503, "loading")
            assert response.headers["retry-after"] == "1"
        assert_problem(ask(client, 1), 503, "loading")
        assert client.get("/openapi.json").status_code == 200
        may_load.set()
        wait_ready(client)
        assert client.get("/readyz").status_code == 200
        assert ask(client, 1).status_code == 200
        assert "example" in topk_operation(client)["requestBody"]["content"]["application/json"]


def test_draining_fails_readiness_alone(folder: Path) -> None:
    app = create_app(Settings(models=folder))
    with in_thread(app) as client:
        wait_ready(client)
        app.state.service.draining = True
        assert_problem(client.get("/readyz"), 503, "not-ready")
        assert client.get("/livez").status_code == 200
        assert client.get("/startupz").status_code == 200
        assert ask(client, 1).status_code == 200


def test_no_model_is_not_ready(tmp_path: Path) -> None:
    with in_thread(create_app(Settings(models=tmp_path))) as client:
        wait_ready(client)
        assert_problem(client.get("/readyz"), 503, "not-ready")
        assert_problem(ask(client, 1), 404, "model-not-found")
        assert client.get("/models").json() == {"models": []}


def test_a_missing_default_model_is_not_ready(folder: Path) -> None:
    with in_thread(create_app(Settings(models=folder, default_model="other"))) as client:
        wait_ready(client)
        assert_problem(client.get("/readyz"), 503, "not-ready")
        assert_problem(ask(client, 1), 404, "model-not-found")
        assert client.post("/models/tiny/topk", json={"inputs": [[0.0] * WIDTH]}).is_success


def test_a_load_that_fails_is_said(tmp_path: Path) -> None:
    with in_thread(create_app(Settings(models=tmp_path / "none"))) as client:
        wait_until(lambda: "failed" in client.get("/startupz").json()["detail"])
        assert_problem(client.get("/readyz"), 503, "not-ready")
        assert client.get("/livez").status_code == 200


# --- OpenAPI ---------------------------------------------------------------------------------


def topk_operation(client: httpx.Client, path: str = "/topk") -> dict[str, Any]:
    operation: dict[str, Any] = client.get("/openapi.json").json()["paths"][path]["post"]
    return operation


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for child in node.values():
            yield from references(child)
    elif isinstance(node, list):
        for child in node:
            yield from references(child)


@pytest.fixture
def document(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/openapi.json").json()
    return found


def test_every_route_is_documented(document: dict[str, Any]) -> None:
    documented = {
        (method.upper(), path) for path, found in document["paths"].items() for method in found
    }
    routes = create_app(Settings(models=Path("none"))).routes
    assert documented == {
        (method, route.path)
        for route in routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods
    }
    assert documented >= {
        ("POST", "/topk"),
        ("POST", "/models/{name}/versions/{version}/topk"),
        ("GET", "/models/{name}/experts"),
        ("GET", "/metrics"),
        ("POST", "/v2/models/{name}/infer"),
        ("GET", "/v2/models/{name}/versions/{version}/ready"),
    }


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    found = set(references(document))
    assert "#/components/schemas/Problem" in found
    for reference in found:
        node: Any = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
    # FastAPI's own error document is never sent, so it must not be promised.
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_every_error_is_documented_as_a_problem(document: dict[str, Any]) -> None:
    topk = document["paths"]["/topk"]["post"]["responses"]
    expected = {"400", "404", "406", "408", "409", "413", "415", "422", "429", "500", "503", "504"}
    assert set(topk) - {"200", "default"} == expected
    for path, operations in document["paths"].items():
        kind = "application/json" if path.startswith("/v2") else "application/problem+json"
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if status != "200":
                    assert list(response["content"]) == [kind]


@pytest.mark.parametrize(
    "path", ["/topk", "/models/{name}/topk", "/models/{name}/versions/{version}/topk"]
)
def test_the_documented_example_is_answered_as_documented(
    http: httpx.Client, document: dict[str, Any], path: str
) -> None:
    operation = document["paths"][path]["post"]
    body = operation["requestBody"]["content"]
    assert set(body) == {"application/json", "application/x-npy"}
    answer = operation["responses"]["200"]["content"]["application/json"]["example"]
    url = path.format(name=answer["model"], version=answer["version"])
    response = http.post(url, json=body["application/json"]["example"])
    assert response.status_code == 200
    assert response.json() == answer
