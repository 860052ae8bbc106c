"""Ids of requests, and the lines of requests that fail."""

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.blocked_pipe import Pipe
from prometheus_client import CollectorRegistry
from starlette.types import Message, Receive, Scope, Send

from service import settings
from service.http.middleware.observe import ObserveRequests
from service.telemetry import request_ids
from service.telemetry.access_log import AccessLog
from service.telemetry.log_queue import LogQueue
from service.telemetry.logging_setup import JsonLines
from service.telemetry.metrics.registry import Metrics
from service.telemetry.request_recorder import LoggingAndTracing


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


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
