"""Traces as a collector gets them, over OTLP/HTTP, from a real server."""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from helpers.server import Running, running, wait_until
from helpers.tiny_bundle import WIDTH, rows_for
from helpers.trace_collector import Collector, Received, collecting

PARENT = "b7ad6b7169203331"

STEPS = ["decode", "queue", "gate", "experts", "encode"]


class Traced(NamedTuple):
    server: Running
    collector: Collector
    http: httpx.Client


@pytest.fixture(scope="module")
def traced(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    log = tmp_path_factory.mktemp("traces") / "log"
    with collecting() as (endpoint, collector):
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=seven",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_SERVICE_NAME": "topk",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test",
            "DSS_ACCESS_LOG": "1",
        }
        with (
            running(models, log, "--default-model", "tiny", env=env) as server,
            httpx.Client(base_url=server.url, timeout=30) as http,
        ):
            yield Traced(server, collector, http)


def parent(trace_id: str, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{PARENT}-{'01' if sampled else '00'}"}


def ask_topk(http: httpx.Client, headers: dict[str, str]) -> httpx.Response:
    body = {"inputs": rows_for(0, 1, 1).tolist(), "k": 2}
    return http.post("/topk", json=body, headers=headers)


def ask_version(http: httpx.Client, headers: dict[str, str]) -> httpx.Response:
    body = {"inputs": rows_for(0, 1, 1).tolist(), "k": 2}
    return http.post("/models/tiny/versions/1/topk", json=body, headers=headers)


def ask_v2(http: httpx.Client, headers: dict[str, str]) -> httpx.Response:
    tensor = {"name": "hidden", "shape": [3, WIDTH], "datatype": "FP32"}
    body = {
        "inputs": [{**tensor, "data": rows_for(0, 1, 1).tolist()}],
        "parameters": {"k": 2},
    }
    return http.post("/v2/models/tiny/infer", json=body, headers=headers)


@pytest.mark.parametrize(
    ("number", "ask", "route", "version"),
    [
        (1, ask_topk, "/topk", 2),
        (2, ask_version, "/models/{name}/versions/{version}/topk", 1),
        (3, ask_v2, "/v2/models/{name}/infer", 2),
    ],
)
def test_a_request_continues_its_callers_trace(
    traced: Traced,
    number: int,
    ask: Callable[[httpx.Client, dict[str, str]], httpx.Response],
    route: str,
    version: int,
) -> None:
    before = time.time_ns()
    for again in range(2):  # a head that is known is answered another way
        trace_id = f"{number:016x}{again + 1:016x}"
        answer = ask(traced.http, {**parent(trace_id), "tracestate": "vendor=opaque"})
        assert answer.status_code == 200
        span = traced.collector.wait_for(trace_id, f"POST {route}")
        assert (span.parent, span.state, span.kind) == (PARENT, "vendor=opaque", 2)  # a server's
        assert not span.failed
        expected = {
            "http.request.method": "POST",
            "http.route": route,
            "http.response.status_code": 200,
            "url.scheme": "http",
            "dss.request_id": answer.headers["x-request-id"],
            "dss.model": "tiny",
            "dss.version": version,
            "dss.rows": 3,
            "dss.k": 2,
        }
        assert expected.items() <= span.attributes.items()
        steps = [step for step in traced.collector.trace(trace_id) if step is not span]
        assert sorted(step.name for step in steps) == sorted(STEPS)
        assert all(step.parent == span.span_id for step in steps)
        by_name = {step.name: step for step in steps}
        ordered = [by_name[name] for name in STEPS]
        # One after the other, all inside the request's own, and all of them now.
        for first, second in pairwise(ordered):
            assert first.start <= first.end <= second.start <= second.end
        assert before <= span.start <= ordered[0].start
        assert ordered[-1].end <= span.end <= time.time_ns()


def test_a_trace_and_a_log_line_name_each_other(traced: Traced) -> None:
    trace_id = "ab" * 16
    answer = ask_topk(traced.http, parent(trace_id))
    span = traced.collector.wait_for(trace_id, "POST /topk")
    name = answer.headers["x-request-id"]
    assert span.attributes["dss.request_id"] == name
    wait_until(
        lambda: f"request_id={name} trace_id={trace_id}" in traced.server.log.read_text(), 10
    )


def test_other_routes_are_traced_too(traced: Traced) -> None:
    trace_id = "cd" * 16
    assert traced.http.get("/models", headers=parent(trace_id)).status_code == 200
    span = traced.collector.wait_for(trace_id, "GET /models")
    assert (span.parent, span.attributes["url.path"]) == (PARENT, "/models")
    assert len(traced.collector.trace(trace_id)) == 1  # FastAPI makes none of its own


def test_a_request_without_a_trace_begins_one(traced: Traced) -> None:
    name = traced.http.get("/models/tiny").headers["x-request-id"]

    def found() -> list[Received]:
        return [s for s in traced.collector.spans if s.attributes.get("dss.request_id") == name]

    wait_until(lambda: bool(found()), 20)
    assert (found()[0].parent, found()[0].attributes["url.path"]) == ("", "/models/tiny")


def test_a_refused_request_says_why(traced: Traced) -> None:
    trace_id = "ef" * 16
    refused = traced.http.post("/topk", json={"inputs": [[1.0]]}, headers=parent(trace_id))
    assert refused.status_code == 422
    span = traced.collector.wait_for(trace_id, "POST /topk")
    assert span.attributes["dss.reason"] == "wrong_width"
    assert span.attributes["http.response.status_code"] == 422
    assert not span.failed  # it is the client's


def test_what_the_caller_does_not_record_is_not_recorded(traced: Traced) -> None:
    """Nor are probes. A request after them is there, so they are not just late."""
    silent, probe, later = "1" * 32, "2" * 32, "3" * 32
    assert ask_topk(traced.http, parent(silent, sampled=False)).status_code == 200
    assert traced.http.get("/models", headers=parent(silent, sampled=False)).status_code == 200
    assert traced.http.get("/readyz", headers=parent(probe)).status_code == 200
    assert ask_topk(traced.http, parent(later)).status_code == 200
    traced.collector.wait_for(later, "POST /topk")
    assert not traced.collector.trace(silent)
    assert not traced.collector.trace(probe)


@pytest.mark.parametrize("sent", ["nonsense", f"00-{'0' * 32}-{PARENT}-01", "00-x-y-01", "\xff"])
def test_a_traceparent_that_is_none_begins_a_new_trace(traced: Traced, sent: str) -> None:
    answer = ask_topk(traced.http, {"traceparent": sent.encode("latin-1")})  # type: ignore[dict-item]
    assert answer.status_code == 200
    name = answer.headers["x-request-id"]

    def found() -> list[Received]:
        return [s for s in traced.collector.spans if s.attributes.get("dss.request_id") == name]

    wait_until(lambda: bool(found()), 20)
    assert found()[0].parent == ""


def test_the_environment_names_the_service_and_speaks_to_the_collector(traced: Traced) -> None:
    trace_id = "4" * 32
    ask_topk(traced.http, parent(trace_id))
    span = traced.collector.wait_for(trace_id, "POST /topk")
    assert span.resource["service.name"] == "topk"
    assert span.resource["deployment.environment"] == "test"
    assert span.resource["process.pid"] == traced.server.process.pid
    assert traced.collector.headers[-1]["x-tenant"] == "seven"


def test_the_last_traces_are_exported_before_the_end(models: Path, tmp_path: Path) -> None:
    trace_id = "5" * 32
    with collecting() as (endpoint, collector):
        env = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{endpoint}/v1/traces",
            "OTEL_BSP_SCHEDULE_DELAY": "600000",
            "DSS_DRAIN_SECONDS": "0",
        }
        with running(models, tmp_path / "log", env=env) as server:
            answer = httpx.get(f"{server.url}/models", headers=parent(trace_id))
            assert answer.status_code == 200
            assert not collector.spans
            server.process.terminate()
            assert server.process.wait(30) == 0
            assert [span.name for span in collector.trace(trace_id)] == ["GET /models"]
