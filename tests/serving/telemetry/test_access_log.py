"""Which requests are logged, and what a line says of one."""

import json
from typing import Any

import numpy as np
import pytest
from helpers.serving.request_event import EVENT

from service.telemetry.access_log import AccessLog, summary
from service.telemetry.logging_setup import JsonLines
from service.telemetry.request_events import Sampling
from service.telemetry.request_recorder import LoggingAndTracing


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 1 / 3, 0.5, 1.0])
def test_the_share_is_kept(share: float) -> None:
    log = AccessLog(share)
    logged = sum(log.is_logged(200, 0.001) for _ in range(10_000))
    assert abs(logged - 10_000 * share) <= 1
    assert log.logs_successes == (share > 0)


def test_failures_and_slow_requests_are_always_logged() -> None:
    log = AccessLog(0.0, slow_seconds=0.5)
    assert log.logs_successes
    assert log.is_logged(500, 0.1) and log.is_logged(503, 0.1)
    assert log.is_logged(200, 0.5)
    assert not log.is_logged(200, 0.4) and not log.is_logged(404, 0.4)
    assert AccessLog().is_logged(500, 0.1) and not AccessLog().logs_successes


def test_with_traces_the_smaller_share_is_part_of_the_larger() -> None:
    rng = np.random.default_rng(0)
    ids = [int.from_bytes(rng.bytes(16)) for _ in range(2000)]
    few = {i for i in ids if AccessLog(0.1).is_logged_by_trace(200, 0.0, i)}
    many = {i for i in ids if AccessLog(0.3).is_logged_by_trace(200, 0.0, i)}
    assert few < many
    assert 140 < len(few) < 260
    assert all(AccessLog(1.0).is_logged_by_trace(200, 0.0, i) for i in (*ids, 1, 2**128 - 1))
    assert not any(AccessLog(0.0).is_logged_by_trace(200, 0.0, i) for i in ids)
    assert AccessLog(0.0).is_logged_by_trace(500, 0.0, ids[0])


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    formatter = JsonLines()
    return [json.loads(formatter.format(r)) for r in caplog.records if r.name == "service.access"]


def test_a_line_tells_what_became_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    LoggingAndTracing(AccessLog(1.0)).record(EVENT)
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
    LoggingAndTracing(AccessLog()).record(refused)
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
    LoggingAndTracing(AccessLog(1.0, slow_seconds=1.0)).record(
        EVENT._replace(status=status, finished=EVENT.arrived + seconds)
    )
    assert [line["level"] for line in logged(caplog)] == [level]


def test_an_event_is_sampled_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    recorder = LoggingAndTracing(AccessLog(0.5))
    for _ in range(10):
        sampling = recorder.sample(200, 0.1)
        if sampling is not None:
            recorder.record(EVENT._replace(sampling=sampling))
    assert len(logged(caplog)) == 5
    for _ in range(10):
        recorder.record(EVENT)  # not asked before: asks itself
    assert len(logged(caplog)) == 10


def test_what_cannot_be_logged_costs_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    broken: Any = ["no array"]
    sampling = Sampling(logged=True, trace_id=0)
    LoggingAndTracing(AccessLog(1.0)).record(
        EVENT._replace(experts=broken, arrived=None, sampling=sampling)
    )
    assert "could not be logged or traced" in caplog.text
