"""Traces as a collector gets them, over OTLP/HTTP, from a real server."""

import gzip
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from helpers.server import Running, free_port, running, wait_until
from helpers.tiny_bundle import WIDTH, rows_for
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from serving.telemetry.test_logs import EVENT

from service.telemetry import spans, tracing
from service.telemetry.access_log import AccessLog
from service.telemetry.request_recorder import LoggingAndTracing
from service.telemetry.spans import Traces

PARENT = "b7ad6b7169203331"
STEPS = ["decode", "queue", "gate", "experts", "encode"]


# --- a collector -----------------------------------------------------------------------------


class Received(NamedTuple):
    name: str
    trace_id: str
    span_id: str
    parent: str
    state: str
    start: int
    end: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    failed: bool
    kind: int


class Collector:
    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.headers: list[dict[str, str]] = []

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.headers.append(headers)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += [_received(span, resource.resource) for span in scope.spans]

    def trace(self, trace_id: str) -> list[Received]:
        return sorted(
            (span for span in self.spans if span.trace_id == trace_id), key=lambda s: s.start
        )

    def wait_for(self, trace_id: str, name: str) -> Received:
        wait_until(lambda: any(span.name == name for span in self.trace(trace_id)), 20)
        return next(span for span in self.trace(trace_id) if span.name == name)


def _received(span: Any, resource: Any) -> Received:  # noqa: ANN401
    return Received(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        state=span.trace_state,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        resource=_values(resource.attributes),
        failed=span.status.code == 2,
        kind=span.kind,
    )


def _values(attributes: Any) -> dict[str, Any]:  # noqa: ANN401
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}


@contextmanager
def collecting() -> Iterator[tuple[str, Collector]]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            collector.take(body, {name.lower(): value for name, value in self.headers.items()})
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as receiver:
        thread = threading.Thread(target=receiver.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{receiver.server_address[1]}", collector
        receiver.shutdown()
        thread.join()


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


# --- by themselves ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def _own_logger() -> Iterator[None]:
    sdk = logging.getLogger("opentelemetry")
    before = sdk.propagate, sdk.handlers
    yield
    sdk.propagate, sdk.handlers = before


@contextmanager
def remembered() -> Iterator[tuple[Traces, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    traces = Traces([exporter])
    try:
        yield traces, exporter
    finally:
        traces.close()


def finished(traces: Traces, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    traces.close()
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, ["otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ["otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "otlp, console"}, ["otlp_proto_http", "console"]),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, []),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, []),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            ["otlp_proto_grpc"],
        ),
    ],
)
def test_the_environment_says_whether_and_where(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], names: list[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tracing.exporter_names() == names
    if not names:
        assert tracing.from_environment() is None


@pytest.mark.usefixtures("_own_logger")
@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_TRACES_EXPORTER", "pigeon"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")],
)
def test_what_cannot_be_had_is_said_and_the_server_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str, value: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(variable, value)
    assert tracing.from_environment() is None
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "Traces are asked for but cannot be made: no exporter" in record.getMessage()


def test_without_the_package_there_is_a_warning_that_names_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.delitem(sys.modules, "service.telemetry.spans")
    monkeypatch.delattr("service.telemetry.spans")
    assert tracing.from_environment() is None
    [record] = caplog.records
    assert record.getMessage().endswith("install doubly-sparse-softmax[otel].")


def test_the_sdk_is_not_imported_unless_it_is_asked_for() -> None:
    """In a process of its own: it is slow to import, and so is what its exporter needs."""
    code = (
        "import sys; from service import settings;"
        "from service.telemetry.request_recorder import logging_and_tracing;"
        "logging_and_tracing(settings.Settings());"
        "print([m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'requests'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert found.stdout.strip() == b"[]"


def test_the_sampler_is_asked_once_and_the_trace_keeps_its_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    with remembered() as (traces, exporter):
        journal = LoggingAndTracing(AccessLog(0.1), traces)
        assert journal.watching
        chosen, logged = [], 0
        for _ in range(400):
            wanted = journal.wanted(200, 0.01)
            if wanted is not None:
                journal.finished(EVENT._replace(traceparent=None, wanted=wanted))
                chosen.append(wanted.trace_id)
                logged += wanted.logged
        traces.close()
        servers = [s for s in exporter.get_finished_spans() if s.parent is None]
        assert [span.context.trace_id for span in servers] == chosen
        assert 50 < len(chosen) < 160
        assert 10 < logged < len(chosen)  # a log line has its trace: the smaller share is inside


def test_the_steps_lie_inside_whatever_the_clock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10**18, 10**9])  # it jumps back by years between two requests
    monkeypatch.setattr(spans, "time_ns", lambda: next(moments))
    for _ in range(2):
        with remembered() as (traces, exporter):
            traces.record(EVENT, trace_id=5)
            found = finished(traces, exporter)
        request = found.pop("POST /models/{name}/topk")
        assert request.end_time - request.start_time == 500_000_000
        assert list(found) == STEPS
        lengths = {n: round((s.end_time - s.start_time) / 1e6) for n, s in found.items()}
        assert lengths == {"decode": 100, "queue": 100, "gate": 50, "experts": 100, "encode": 100}
        assert all(request.start_time <= s.start_time <= s.end_time for s in found.values())
        assert all(s.end_time <= request.end_time for s in found.values())


def test_threads_that_compute_longer_than_time_passes_fit_in() -> None:
    with remembered() as (traces, exporter):
        traces.record(EVENT._replace(gate_seconds=0.15, expert_seconds=9.0), trace_id=5)
        found = finished(traces, exporter)
    assert found["experts"].end_time == found["encode"].start_time


def test_a_failure_is_an_error_with_its_kind() -> None:
    failed = EVENT._replace(status=504, reason="deadline_exceeded", started=0.0, computed=0.0)
    with remembered() as (traces, exporter):
        traces.record(failed, trace_id=5)
        found = finished(traces, exporter)
    request = found.pop("POST /models/{name}/topk")
    assert request.attributes is not None
    assert request.attributes["error.type"] == "deadline_exceeded"
    assert not request.status.is_ok
    assert set(found) == {"decode", "queue"}  # it waited until it was given up


def test_an_unknown_method_is_not_a_label_of_its_own() -> None:
    strange = EVENT._replace(method="other", route="unmatched", experts=None)
    with remembered() as (traces, exporter):
        traces.record(strange, trace_id=5)
        found = finished(traces, exporter)
    assert found["HTTP"].attributes is not None
    assert found["HTTP"].attributes["http.request.method"] == "_OTHER"
    assert "http.route" not in found["HTTP"].attributes


@pytest.mark.usefixtures("_own_logger")
def test_a_dead_collector_costs_one_warning_and_little_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spans, "CLOSE_SECONDS", 0.5)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    traces = tracing.from_environment()
    assert traces is not None
    begun = time.monotonic()
    for number in range(1, 500):
        traces.record(EVENT, trace_id=number)
    wait_until(lambda: "Of traces: " in caplog.text, 20)
    traces.close()
    assert time.monotonic() - begun < 15
    assert caplog.text.count("Of traces: ") == 1


def test_a_collector_that_never_answers_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spans, "CLOSE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
        traces = spans.exported_by(["otlp_proto_http"], "http")
        traces.record(EVENT, trace_id=5)
        begun = time.monotonic()
        traces.close()
        assert time.monotonic() - begun < 1.5
    assert "The last traces were not taken in 0.2 seconds." in caplog.text


def test_complaints_are_repeated_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    moments = iter([0.0, 1.0, 59.0, 61.0])
    complaints = spans.Complaints(lambda: next(moments))
    for number in range(4):
        complaints.handle(logging.makeLogRecord({"msg": f"no. {number}", "levelno": 40}))
    said = [record.getMessage() for record in caplog.records]
    # Threads of other tests may still complain of a collector of theirs.
    assert [line for line in said if "no. " in line] == [
        "Of traces: no. 0",
        "Of traces: no. 3 (Since the last time 2 such messages.)",
    ]
