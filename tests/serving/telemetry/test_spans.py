"""Traces by themselves: what turns them on, sampling, spans, a collector that is gone."""

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from helpers.server import free_port, wait_until
from helpers.serving.request_event import EVENT
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from service.telemetry import spans, tracing
from service.telemetry.access_log import AccessLog
from service.telemetry.request_recorder import LoggingAndTracing
from service.telemetry.spans import Traces

STEPS = ["decode", "queue", "gate", "experts", "encode"]


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
        recorder = LoggingAndTracing(AccessLog(0.1), traces)
        assert recorder.records_successes
        chosen, logged = [], 0
        for _ in range(400):
            sampling = recorder.sample(200, 0.01)
            if sampling is not None:
                recorder.record(EVENT._replace(traceparent=None, sampling=sampling))
                chosen.append(sampling.trace_id)
                logged += sampling.logged
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
    assert "The collector did not take the last traces in 0.2 seconds" in caplog.text


def test_warnings_are_repeated_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    moments = iter([0.0, 1.0, 59.0, 61.0])
    warnings = spans.SdkWarnings(lambda: next(moments))
    for number in range(4):
        warnings.handle(logging.makeLogRecord({"msg": f"no. {number}", "levelno": 40}))
    said = [record.getMessage() for record in caplog.records]
    # Threads of other tests may still warn of a collector of theirs.
    assert [line for line in said if "no. " in line] == [
        "Of traces: no. 0",
        "Of traces: no. 3 (Since the last time 2 such messages.)",
    ]
