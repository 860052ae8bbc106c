"""Gives every request an id, counts its answer, and has it logged and traced if it is sampled.

Inference requests (`inference/request.py`) and all others (`middleware/observe.py`) are observed by
the one class here.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from time import perf_counter
from typing import Any, NamedTuple

from service.telemetry import request_ids
from service.telemetry.metrics.registry import Metrics
from service.telemetry.request_events import RequestEvent, RequestRecorder

Header = tuple[bytes, bytes]

ID_HEADER = request_ids.HEADER


class TraceHeaders(NamedTuple):
    """What a client calls its request."""

    request_id: bytes | None = None
    traceparent: bytes | None = None
    tracestate: bytes | None = None


NO_TRACE_HEADERS = TraceHeaders()


def read_trace_headers(headers: Iterable[Header]) -> TraceHeaders:
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name == b"tracestate" and name in found:
            found[name] += b"," + value
        elif name in (ID_HEADER, b"traceparent", b"tracestate"):
            found[name] = value
    if not found:
        return NO_TRACE_HEADERS
    return TraceHeaders(found.get(ID_HEADER), found.get(b"traceparent"), found.get(b"tracestate"))


class ObservedRequest(ABC):
    """One request, from its arrival to its answer."""

    def __init__(self, metrics: Metrics, recorder: RequestRecorder, trace: TraceHeaders) -> None:
        self.arrived = perf_counter()
        self.metrics = metrics
        self._recorder = recorder
        self._trace = trace
        sent = trace.request_id
        self.request_id = request_ids.new() if sent is None else request_ids.accepted(sent)

    def count(self, route: str, method: str, status: int) -> float:
        """Counts the answer; returns when that was.

        Before it leaves, so that a client that has its answer finds it counted.
        """
        finished = perf_counter()
        self.metrics.http.answered(route, method, status, finished - self.arrived)
        return finished

    def record(self, status: int, finished: float) -> None:
        """Has the request logged and traced, if it is sampled."""
        recorder, trace = self._recorder, self._trace
        if not (recorder.records_successes or status >= 500):
            return
        seconds = finished - self.arrived
        sampling = recorder.sample(status, seconds, trace.traceparent, trace.tracestate)
        if sampling is None:
            return
        recorder.record(
            RequestEvent(
                status=status,
                request_id=self.request_id.decode(),
                traceparent=_text(trace.traceparent),
                tracestate=_text(trace.tracestate),
                arrived=self.arrived,
                finished=finished,
                sampling=sampling,
                **self.details(),
            )
        )

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """The other fields of the request's event."""


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
