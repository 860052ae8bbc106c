"""One line for some of the requests: those that failed, slow ones, and a share of all others."""

import logging
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.telemetry.request_events import RequestEvent

logger = logging.getLogger("service.access")

TOP = 3  # experts named in a line
LONGEST_PATH = 256
IDS = 1 << 64  # values of a trace id's lower half
TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")

# Logged as warnings: a server may be full or starting.
EXPECTED = (503, 504)


class AccessLog:
    """Logs a `share` of all requests, evenly spread."""

    def __init__(self, share: float = 0.0, slow_seconds: float | None = None) -> None:
        self.logs_successes = share > 0.0 or slow_seconds is not None
        self._share = share
        self._slow_seconds = float("inf") if slow_seconds is None else slow_seconds
        self._due = 0.0  # how much of the next line is due: it is written at 1

    def is_logged(self, status: int, seconds: float) -> bool:
        self._due += self._share
        if self._due >= 1.0:
            self._due -= 1.0
            return True
        return status >= 500 or seconds >= self._slow_seconds

    def is_logged_by_trace(self, status: int, seconds: float, trace_id: int) -> bool:
        """The id decides, as it does for traces: of two shares the smaller is in the larger."""
        by_id = trace_id % IDS < self._share * IDS
        return by_id or status >= 500 or seconds >= self._slow_seconds

    def write(self, event: RequestEvent, trace_id: int = 0) -> None:
        level = logging.INFO
        if event.status >= 500:
            level = logging.WARNING if event.status in EXPECTED else logging.ERROR
        elif event.finished - event.arrived >= self._slow_seconds:
            level = logging.WARNING
        if logger.isEnabledFor(level):
            message = f"{event.method} {event.route} {event.status}"
            logger.log(level, message, extra=dict(_fields(event, trace_id)))


def _fields(event: RequestEvent, trace_id: int) -> Iterator[tuple[str, Any]]:
    yield "request_id", event.request_id
    trace = f"{trace_id:032x}" if trace_id else _sent_trace(event.traceparent)
    if trace is not None:
        yield "trace_id", trace
    yield "method", event.method
    yield "route", event.route
    if event.path not in ("", event.route):
        yield "path", event.path[:LONGEST_PATH]
    yield "status", event.status
    if event.reason is not None:
        yield "reason", event.reason
    if event.model:
        yield "model", event.model
        yield "version", event.version
    if event.rows:
        yield "rows", event.rows
        yield "k", event.k
        yield "searched", event.searched
        if event.mode:
            yield "mode", event.mode
            yield "escalated", event.escalated
    if event.experts is not None:
        yield "experts", summary(event.experts)
    yield "bytes_in", event.bytes_in
    yield "bytes_out", event.bytes_out
    yield "seconds", _rounded(event.finished - event.arrived)
    steps = timings(event)
    if steps:
        yield "timings", steps


def summary(experts: NDArray[np.int64]) -> dict[str, Any]:
    """How many different experts the rows chose, and what share the most frequent ones have."""
    found, counts = np.unique(experts, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:TOP]
    top = {str(found[i]): round(float(counts[i]) / len(experts), 4) for i in order}
    return {"distinct": len(found), "top": top}


def timings(event: RequestEvent) -> dict[str, float]:
    """The seconds of each step, as far as the request came."""
    steps = {}
    if event.decoded:
        steps["decode"] = event.decoded - event.arrived
        steps["queue"] = (event.started or event.finished) - event.decoded
    if event.computed:
        steps["gate"] = event.gate_seconds
        steps["experts"] = event.expert_seconds
        steps["compute"] = event.computed - event.started
        steps["encode"] = event.finished - event.computed
    return {step: _rounded(seconds) for step, seconds in steps.items()}


def _rounded(seconds: float) -> float:
    return round(max(seconds, 0.0), 7)


def _sent_trace(traceparent: str | None) -> str | None:
    found = TRACEPARENT.fullmatch(traceparent) if traceparent else None
    return found[1] if found else None
