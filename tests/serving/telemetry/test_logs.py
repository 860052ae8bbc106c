"""What is logged, how a line looks, and that nobody waits for a log that nobody reads."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from helpers.blocked_pipe import Pipe
from helpers.server import Running, free_port, running, wait_until
from helpers.tiny_bundle import WIDTH, rows_for
from prometheus_client import CollectorRegistry
from starlette.types import Message, Receive, Scope, Send

from service import settings
from service.http.middleware.observe import ObserveRequests
from service.telemetry import log_queue, logging_setup, request_ids
from service.telemetry.access_log import AccessLog, summary
from service.telemetry.log_queue import LogQueue
from service.telemetry.logging_setup import JsonLines, TextLines
from service.telemetry.metrics.registry import Metrics
from service.telemetry.request_events import RequestEvent, Sampling
from service.telemetry.request_recorder import LoggingAndTracing

EVENT = RequestEvent(
    route="/models/{name}/topk",
    method="POST",
    status=200,
    request_id="mine",
    traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
    tracestate=None,
    arrived=10.0,
    finished=10.5,
    model="tiny",
    version=2,
    rows=4,
    k=3,
    searched=1,
    experts=np.array([7, 7, 2, 9]),
    bytes_in=100,
    bytes_out=200,
    decoded=10.1,
    started=10.2,
    computed=10.4,
    gate_seconds=0.05,
    expert_seconds=0.1,
    path="/models/tiny/topk",
)


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("service.x", logging.INFO, "x.py", 1, message, arguments, None)
    vars(made).update(extra)
    return made


def failure(text: str) -> logging.LogRecord:
    try:
        raise ValueError(text)
    except ValueError:
        made = record("It failed.")
        made.exc_info = sys.exc_info()
        return made


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


# --- lines -----------------------------------------------------------------------------------


def test_a_json_line_holds_message_and_fields() -> None:
    line = json.loads(JsonLines(worker=3).format(record("%d rows", 2, rows=2, top={"7": 0.5})))
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "service.x",
        "message": "2 rows",
        "rows": 2,
        "top": {"7": 0.5},
        "worker": 3,
    }


def test_a_field_cannot_replace_what_every_line_has() -> None:
    assert json.loads(JsonLines().format(record("true", level="false")))["level"] == "info"


def test_an_exception_is_a_field_of_the_same_line() -> None:
    text = JsonLines().format(failure("two\nlines"))
    assert "\n" not in text
    assert "ValueError: two\nlines" in json.loads(text)["exception"]


@pytest.mark.parametrize("value", [b"bytes", object(), "\udcff", {1: 2}, np.float32(1), {1, 2}])
def test_whatever_is_given_can_be_written(value: object) -> None:
    for formatter in (JsonLines(), TextLines()):
        line = formatter.format(record("said %s", value, field=value))
        assert "\n" not in line and "field" in line


def test_a_request_that_is_being_handled_is_named() -> None:
    handled = request_ids.current.set("abc")
    try:
        assert json.loads(JsonLines().format(record("x")))["request_id"] == "abc"
        assert TextLines().format(record("x")).endswith(": x request_id=abc")
    finally:
        request_ids.current.reset(handled)
    assert "request_id" not in JsonLines().format(record("x"))


def test_a_text_line_shows_the_fields() -> None:
    line = TextLines().format(record("x", rows=2, timings={"gate": 0.25}, note="two words"))
    assert line.endswith('INFO service.x: x rows=2 timings.gate=0.25 note="two words"')


@pytest.mark.parametrize("character", ["\n", "\r", "\x1b", "\x00", "\u2028", "\x85", "\u202e"])
def test_no_character_breaks_a_text_line(character: str) -> None:
    line = TextLines().format(record("to %s", f"a{character}b", path=f"/{character}"))
    assert line.isprintable()
    assert len(line.splitlines()) == 1


def test_the_lines_of_a_trace_are_indented() -> None:
    first, *rest = TextLines().format(failure("x\n2026-01-01 INFO forged")).splitlines()
    assert first.endswith("It failed.")
    assert all(line.startswith("    ") for line in rest)


def test_uvicorns_colours_are_left_out() -> None:
    line = JsonLines().format(record("Started", color_message="\x1b[36mStarted"))
    assert "color" not in line


# --- levels ----------------------------------------------------------------------------------


@pytest.fixture
def _levels() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.mark.usefixtures("_levels")
def test_the_level_can_be_changed() -> None:
    logger = logging.getLogger("service.x")
    for level in logging_setup.LEVELS:
        logging_setup.set_level(level)
        assert logging_setup.current().level == level
        assert logger.isEnabledFor(getattr(logging, level.upper()))
    assert not logger.isEnabledFor(logging.WARNING)
    with pytest.raises(
        logging_setup.UnknownLevel, match="must be one of debug, info, warning, error"
    ):
        logging_setup.set_level("loud")
    assert logging_setup.current().level == "error"


# --- which requests --------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 1 / 3, 0.5, 1.0])
def test_the_share_is_kept(share: float) -> None:
    log = AccessLog(share)
    logged = sum(log.wants(200, 0.001) for _ in range(10_000))
    assert abs(logged - 10_000 * share) <= 1
    assert log.watching == (share > 0)


def test_failures_and_slow_requests_are_always_logged() -> None:
    log = AccessLog(0.0, slow_seconds=0.5)
    assert log.watching
    assert log.wants(500, 0.1) and log.wants(503, 0.1)
    assert log.wants(200, 0.5)
    assert not log.wants(200, 0.4) and not log.wants(404, 0.4)
    assert AccessLog().wants(500, 0.1) and not AccessLog().watching


def test_with_traces_the_smaller_share_is_part_of_the_larger() -> None:
    rng = np.random.default_rng(0)
    ids = [int.from_bytes(rng.bytes(16)) for _ in range(2000)]
    few = {i for i in ids if AccessLog(0.1).wants_traced(200, 0.0, i)}
    many = {i for i in ids if AccessLog(0.3).wants_traced(200, 0.0, i)}
    assert few < many
    assert 140 < len(few) < 260
    assert all(AccessLog(1.0).wants_traced(200, 0.0, i) for i in (*ids, 1, 2**128 - 1))
    assert not any(AccessLog(0.0).wants_traced(200, 0.0, i) for i in ids)
    assert AccessLog(0.0).wants_traced(500, 0.0, ids[0])


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    formatter = JsonLines()
    return [json.loads(formatter.format(r)) for r in caplog.records if r.name == "service.access"]


def test_a_line_tells_what_became_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    LoggingAndTracing(AccessLog(1.0)).finished(EVENT)
    [line] = logged(caplog)
    line.pop("time")
    assert line == {
        "level": "info",
        "logger": "service.access",
        "message": "POST /models/{name}/topk 200",
        "request_id": "mine",
        "trace_id": "a" * 32,
        "method": "POST",
        "route": "/models/{name}/topk",
        "path": "/models/tiny/topk",
        "status": 200,
        "model": "tiny",
        "version": 2,
        "rows": 4,
        "k": 3,
        "searched": 1,
        "experts": {"distinct": 3, "top": {"7": 0.5, "2": 0.25, "9": 0.25}},
        "bytes_in": 100,
        "bytes_out": 200,
        "seconds": 0.5,
        "timings": {
            "decode": 0.1,
            "queue": 0.1,
            "gate": 0.05,
            "experts": 0.1,
            "compute": 0.2,
            "encode": 0.1,
        },
    }


def test_only_the_most_frequent_experts_are_named() -> None:
    found = summary(np.array([5, 5, 5, 5, 3, 3, 3, 1, 1, 8]))
    assert found == {"distinct": 4, "top": {"5": 0.4, "3": 0.3, "1": 0.2}}


def test_a_request_that_was_refused_has_what_it_came_to(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    refused = EVENT._replace(
        status=504, reason="deadline_exceeded", experts=None, started=0.0, computed=0.0
    )
    LoggingAndTracing(AccessLog()).finished(refused)
    [line] = logged(caplog)
    assert (line["level"], line["reason"]) == ("warning", "deadline_exceeded")
    assert "experts" not in line
    assert line["timings"] == {"decode": 0.1, "queue": 0.4}


@pytest.mark.parametrize(
    ("status", "seconds", "level"),
    [(200, 0.1, "info"), (404, 0.1, "info"), (200, 2.0, "warning"), (500, 0.1, "error")],
)
def test_what_is_worse_has_a_higher_level(
    caplog: pytest.LogCaptureFixture, status: int, seconds: float, level: str
) -> None:
    caplog.set_level("INFO")
    LoggingAndTracing(AccessLog(1.0, slow_seconds=1.0)).finished(
        EVENT._replace(status=status, finished=EVENT.arrived + seconds)
    )
    assert [line["level"] for line in logged(caplog)] == [level]


def test_an_event_is_sampled_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    journal = LoggingAndTracing(AccessLog(0.5))
    for _ in range(10):
        wanted = journal.wanted(200, 0.1)
        if wanted is not None:
            journal.finished(EVENT._replace(wanted=wanted))
    assert len(logged(caplog)) == 5
    for _ in range(10):
        journal.finished(EVENT)  # not asked before: asks itself
    assert len(logged(caplog)) == 10


def test_what_cannot_be_logged_costs_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    broken: Any = ["no array"]
    wanted = Sampling(logged=True, trace_id=0)
    LoggingAndTracing(AccessLog(1.0)).finished(
        EVENT._replace(experts=broken, arrived=None, wanted=wanted)
    )
    assert "could not be written down" in caplog.text


# --- names and settings ----------------------------------------------------------------------


def test_a_fit_name_is_kept_and_others_are_replaced() -> None:
    assert request_ids.accepted(b"order-7/x") == b"order-7/x"
    for unfit in (None, b"", b"two words", b"x\n", b"\xff", b"x" * 129):
        assert request_ids.accepted(unfit) != unfit
    assert len({request_ids.new() for _ in range(100)}) == 100


def test_a_forked_process_makes_other_names(pipe: Pipe) -> None:
    child = os.fork()
    if not child:
        os.write(pipe.into, b"%b\n" % request_ids.new())
        os._exit(0)
    os.waitpid(child, 0)
    assert pipe.read_lines(1) != [request_ids.new().decode()]


@pytest.mark.parametrize(
    ("text", "share"), [("true", 1.0), ("False", 0.0), ("0.01", 0.01), ("1", 1.0), ("0", 0.0)]
)
def test_the_share_may_be_spelled_like_a_switch(
    monkeypatch: pytest.MonkeyPatch, text: str, share: float
) -> None:
    monkeypatch.setenv("DSS_ACCESS_LOG", text)
    assert settings.load().access_log == share


def test_a_share_is_between_none_and_all(tmp_path: Path) -> None:
    path = tmp_path / "dss.toml"
    path.write_text("access_log = true\nslow_seconds = 0.5\n")
    loaded = settings.load({}, path)
    assert (loaded.access_log, loaded.slow_seconds) == (1.0, 0.5)
    for wrong in ("1.5", "-0.1", '"often"'):
        path.write_text(f"access_log = {wrong}\n")
        with pytest.raises(settings.SettingsError, match="'access_log' is wrong"):
            settings.load({}, path)


def test_an_unforeseen_failure_is_logged_under_the_requests_name(
    pipe: Pipe, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive, send
        raise RuntimeError("secret\nreason")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    writer = LogQueue(pipe.into)
    writer.setFormatter(JsonLines())
    logging.getLogger("service").addHandler(writer)
    headers = [(b"x-request-id", b"mine"), (b"authorization", b"Bearer hidden")]
    scope = {"type": "http", "method": "GET", "path": "/x", "headers": headers}
    try:
        edge = ObserveRequests(broken, Metrics(CollectorRegistry()), LoggingAndTracing(AccessLog()))
        asyncio.run(edge(scope, receive, send))
    finally:
        logging.getLogger("service").removeHandler(writer)
        writer.close()
    assert sent[0]["status"] == 500
    assert (b"x-request-id", b"mine") in sent[0]["headers"]
    assert b"secret" not in sent[1]["body"]
    text = pipe.read_lines(2)
    failed, access = map(json.loads, text)
    assert (failed["logger"], failed["request_id"]) == ("service.http.middleware.observe", "mine")
    assert "RuntimeError: secret\nreason" in failed["exception"]
    assert (access["logger"], access["request_id"]) == ("service.access", "mine")
    assert (access["level"], access["reason"]) == ("error", "runtime_error")
    assert "hidden" not in "".join(text) + caplog.text


# --- a real server ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def watched(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that logs every request as JSON."""
    log = tmp_path_factory.mktemp("logs") / "log"
    env = {"DSS_ACCESS_LOG": "1", "DSS_LOG_FORMAT": "json", "DSS_LOG_LEVEL": "debug"}
    with running(models, log, "--default-model", "tiny", env=env) as started:
        yield started


def lines_of(server: Running, request_id: str) -> list[dict[str, Any]]:
    """Once there is an access line: everything that was logged for a request."""

    def found() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        return [line for line in lines if line.get("request_id") == request_id]

    wait_until(lambda: any(line["logger"] == "service.access" for line in found()), 10)
    return found()


def test_every_line_of_a_server_is_json(watched: Running) -> None:
    lines = [json.loads(line) for line in watched.log.read_text().splitlines()]
    assert {"uvicorn.error", "service.access"} <= {line["logger"] for line in lines}


@pytest.mark.parametrize("path", ["/topk", "/models/tiny/versions/1/topk"])
def test_an_answer_and_its_line_bear_the_clients_name(watched: Running, path: str) -> None:
    body = {"inputs": rows_for(0, 0, 1).tolist(), "k": 2}
    name = f"client{path.replace('/', '-')}"
    with httpx.Client(base_url=watched.url, headers={"X-Request-ID": name}) as client:
        for _ in range(2):  # known heads are answered another way
            answer = client.post(path, json=body)
            assert answer.headers["x-request-id"] == name
    wait_until(lambda: len(lines_of(watched, name)) == 2, 10)
    for line in lines_of(watched, name):
        assert (line["status"], line["model"], line["rows"], line["k"]) == (200, "tiny", 3, 2)
        assert line["version"] == int(answer.headers["dss-model-version"])
        assert line["experts"] == {"distinct": 2, "top": {"0": 0.6667, "1": 0.3333}}
        assert line["bytes_in"] == int(answer.request.headers["content-length"])
        assert line["bytes_out"] == len(answer.content)
        steps = line["timings"]
        assert set(steps) == {"decode", "queue", "gate", "experts", "compute", "encode"}
        apart = steps["decode"] + steps["queue"] + steps["compute"] + steps["encode"]
        assert apart == pytest.approx(line["seconds"], abs=1e-6)
        assert 0 < steps["gate"] + steps["experts"] <= steps["compute"] + 1e-6


def test_a_v2_request_is_logged_like_any(watched: Running) -> None:
    tensor = {"name": "hidden", "shape": [1, WIDTH], "datatype": "FP32"}
    body = {"inputs": [{**tensor, "data": rows_for(2).tolist()}], "parameters": {"k": 3}}
    answer = httpx.post(
        f"{watched.url}/v2/models/tiny/infer", json=body, headers={"x-request-id": "v2"}
    )
    assert answer.headers["x-request-id"] == "v2"
    [line] = lines_of(watched, "v2")
    assert (line["route"], line["model"], line["k"]) == ("/v2/models/{name}/infer", "tiny", 3)
    assert line["experts"] == {"distinct": 1, "top": {"2": 1.0}}


@pytest.mark.parametrize(
    ("method", "path", "status", "route", "reason"),
    [
        ("GET", "/models", 200, "/models", None),
        ("GET", "/models/none", 404, "/models/{name}", "model_not_found"),
        ("GET", "/nothing/here", 404, "unmatched", None),
        ("POST", "/models/none/topk", 404, "/models/{name}/topk", "model_not_found"),
        ("POST", "/topk", 422, "/topk", "wrong_width"),
    ],
)
def test_every_route_names_and_logs_its_requests(
    watched: Running, method: str, path: str, status: int, route: str, reason: str | None
) -> None:
    body = {"inputs": [[1.0]]} if method == "POST" else None
    answer = httpx.request(method, watched.url + path, json=body)
    assert answer.status_code == status
    name = answer.headers["x-request-id"]
    line = lines_of(watched, name)[-1]
    assert (line["method"], line["route"], line["status"]) == (method, route, status)
    assert line.get("reason") == reason
    assert line["bytes_out"] == len(answer.content)


def test_a_name_cannot_forge_a_line(watched: Running) -> None:
    """Neither as a header, nor in a path, which may hold any character once it is unquoted."""
    answer = httpx.get(f"{watched.url}/models/a%0A%1B%5B31m", headers={"x-request-id": "a b"})
    name = answer.headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", name)
    assert lines_of(watched, name)[-1]["path"] == "/models/a\n\x1b[31m"


def test_probes_are_not_left_out(watched: Running) -> None:
    name = httpx.get(f"{watched.url}/livez").headers["x-request-id"]
    assert lines_of(watched, name)[-1]["route"] == "/livez"


def test_a_server_whose_log_nobody_reads_still_answers_and_ends(models: Path) -> None:
    port = free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith("DSS_")}
    env |= {"DSS_ACCESS_LOG": "1", "DSS_LOG_FORMAT": "json", "DSS_DRAIN_SECONDS": "0"}
    pipe = Pipe()
    command = [sys.executable, "-m", "service.cli", "serve", "--models", str(models)]
    with subprocess.Popen([*command, "--port", str(port)], stderr=pipe.into, env=env) as process:
        try:
            server = Running(f"http://127.0.0.1:{port}", port, process, Path(os.devnull))
            server.wait_for("/readyz")
            ask_often(port, log_queue.ROOM + 200)
            assert pipe.is_full()
            answer = httpx.get(f"{server.url}/metrics")
            dropped = re.search(r"^dss_log_lines_dropped_total (\S+)$", answer.text, re.MULTILINE)
            assert dropped is not None and float(dropped[1]) > 100
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert time.monotonic() - begun < 15
        finally:
            process.kill()
            pipe.close()


def ask_often(port: int, count: int) -> None:
    """As many requests as quickly as one connection allows."""
    request = b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(30)
        answered = sent = 0
        while answered < count:
            if sent - answered < 50:
                connection.sendall(request * 50)
                sent += 50
            text = connection.recv(1 << 20)
            assert text, "The server closed the connection."
            answered += text.count(b"HTTP/1.1 404")


def test_workers_say_which_one_they_are(models: Path, tmp_path: Path) -> None:
    env = {"DSS_LOG_FORMAT": "json", "DSS_ACCESS_LOG": "1"}
    with running(models, tmp_path / "log", "--workers", "2", env=env) as server:
        name = httpx.get(f"{server.url}/models").headers["x-request-id"]
        assert lines_of(server, name)[-1]["worker"] in (0, 1)
        everything = [json.loads(line) for line in server.log.read_text().splitlines()]
        assert {0, 1, None} == {line.get("worker") for line in everything}  # None: the supervisor
