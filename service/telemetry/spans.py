"""Makes a request's trace when it is finished, from the moments in its event.

One span for the request, and inside it one for each step: decode, queue, gate, experts, encode.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points, version
from time import monotonic, perf_counter, time_ns
from typing import Any

from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    SpanKind,
    Status,
    StatusCode,
    get_current_span,
    set_span_in_context,
)

from service.errors import DSSError
from service.telemetry.request_events import RequestEvent

logger = logging.getLogger(__name__)

PACKAGE = "doubly-sparse-softmax"
CLOSE_SECONDS = 3.0  # to wait at the end for a collector that does not answer
WARNING_SECONDS = 60.0  # between two warnings of the SDK
LONGEST_PATH = 256
# Probes and scrapes, which come all the time and are no part of a trace.
UNTRACED = {
    "/livez", "/readyz", "/startupz", "/metrics", "/v2/health/live", "/v2/health/ready"
}  # fmt: skip


class ExporterMissing(DSSError):
    pass


def exported_by(names: Sequence[str], scheme: str) -> "Traces":
    """Traces that go to the exporters of these names."""
    exporters = [_exporter(name) for name in names]
    _limit_warnings()
    return Traces(exporters, scheme)


def _exporter(name: str) -> SpanExporter:
    found = next(iter(entry_points(group="opentelemetry_traces_exporter", name=name)), None)
    if found is None:
        raise ExporterMissing(f"no exporter {name!r} is installed.")
    exporter: SpanExporter = found.load()()
    return exporter


class Traces:
    def __init__(self, exporters: Sequence[SpanExporter], scheme: str = "http") -> None:
        self._scheme = scheme
        self._ids = ChosenIds()
        # Not the process's global provider: FastAPI would make spans of its own with that one.
        self._provider = TracerProvider(
            resource=_resource(), id_generator=self._ids, shutdown_on_exit=False
        )
        for exporter in exporters:
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(PACKAGE, version(PACKAGE))
        self._root = Context()  # of a request that continues no trace
        self._continued: tuple[str, str | None, Context] = ("", None, self._root)  # the last

    def decide(self, traceparent: str | None, tracestate: str | None) -> tuple[int, bool]:
        """The id of a request's trace, and whether it is recorded."""
        context = self._context(traceparent, tracestate)
        trace_id = get_current_span(context).get_span_context().trace_id
        trace_id = trace_id or self._ids.generate_trace_id()
        sampled = self._provider.sampler.should_sample(context, trace_id, "", SpanKind.SERVER)
        return trace_id, sampled.decision is Decision.RECORD_AND_SAMPLE

    def record(self, event: RequestEvent, trace_id: int) -> None:
        """The spans of a request whose trace is recorded."""
        if event.route in UNTRACED:
            return
        # One offset for all of them: a clock that jumps moves the spans, none against another.
        offset = time_ns() - round(perf_counter() * 1e9)

        def moment(seconds: float) -> int:
            return round(seconds * 1e9) + offset

        self._ids.chosen = trace_id
        span = self._tracer.start_span(
            _name(event),
            self._context(event.traceparent, event.tracestate),
            SpanKind.SERVER,
            dict(_attributes(event, self._scheme)),
            start_time=moment(event.arrived),
        )
        self._ids.chosen = 0
        if event.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span, self._root)
        for name, start, end in steps(event):
            step = self._tracer.start_span(name, inside, start_time=moment(start))
            step.end(moment(end))
        span.end(moment(event.finished))

    def close(self) -> None:
        """Export what is left, if the collector takes it in time."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            logger.warning(
                "The collector did not take the last traces in %g seconds; they are lost.",
                CLOSE_SECONDS,
            )

    def _context(self, traceparent: str | None, tracestate: str | None) -> Context:
        """The trace that a request continues. Asked for twice in a row, so the last one is kept."""
        if traceparent is None:
            return self._root
        *kept, context = self._continued
        if kept != [traceparent, tracestate]:
            carrier = {"traceparent": traceparent}
            if tracestate is not None:
                carrier["tracestate"] = tracestate
            context = propagate.extract(carrier, self._root)
            self._continued = (traceparent, tracestate, context)
        return context


class ChosenIds(RandomIdGenerator):
    """Gives a request's span the trace id by which it was sampled."""

    chosen = 0

    def generate_trace_id(self) -> int:
        return self.chosen or super().generate_trace_id()


def steps(event: RequestEvent) -> Iterator[tuple[str, float, float]]:
    """The name, start and end of each step, as far as the request came."""
    if event.decoded:
        yield "decode", event.arrived, event.decoded
        yield "queue", event.decoded, max(event.started or event.finished, event.decoded)
    if event.computed:
        # Several threads together may compute for more seconds than pass.
        scored = min(event.started + event.gate_seconds, event.computed)
        yield "gate", event.started, scored
        yield "experts", scored, min(scored + event.expert_seconds, event.computed)
        yield "encode", event.computed, event.finished


def _name(event: RequestEvent) -> str:
    method = "HTTP" if event.method == "other" else event.method
    return method if event.route == "unmatched" else f"{method} {event.route}"


def _attributes(event: RequestEvent, scheme: str) -> Iterator[tuple[str, Any]]:
    yield "http.request.method", "_OTHER" if event.method == "other" else event.method
    if event.route != "unmatched":
        yield "http.route", event.route
    path = event.path or ("" if "{" in event.route else event.route)
    if path:
        yield "url.path", path[:LONGEST_PATH]
    yield "url.scheme", scheme
    yield "http.response.status_code", event.status
    if event.status >= 500:
        yield "error.type", event.reason or str(event.status)
    if event.reason is not None:
        yield "dss.reason", event.reason
    yield "dss.request_id", event.request_id
    if event.model:
        yield "dss.model", event.model
        yield "dss.version", event.version
    if event.rows:
        yield "dss.rows", event.rows
        yield "dss.k", event.k
        yield "dss.searched", event.searched
        if event.mode:
            yield "dss.mode", event.mode
            yield "dss.escalated", event.escalated


def _resource() -> Resource:
    """Named as the environment says, or by the package."""
    resource = Resource.create({"service.version": version(PACKAGE), "process.pid": os.getpid()})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: PACKAGE}))
    return resource


class SdkWarnings(logging.Handler):
    """Logs what the SDK warns of, at most once a minute: a dead collector would fill the log."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._logged_at = -WARNING_SECONDS
        self._suppressed = 0

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        if now - self._logged_at < WARNING_SECONDS:
            self._suppressed += 1
            return
        more = (
            f" (Since the last time {self._suppressed} such messages.)" if self._suppressed else ""
        )
        logger.warning("Of traces: %s%s", record.getMessage(), more)
        self._logged_at, self._suppressed = now, 0


def _limit_warnings() -> None:
    sdk = logging.getLogger("opentelemetry")
    sdk.propagate = False
    sdk.handlers = [SdkWarnings()]
