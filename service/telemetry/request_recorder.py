"""The journal of a real server: an access log, and traces if they are asked for."""

import logging
from typing import TYPE_CHECKING

from service.settings import Settings
from service.telemetry import tracing
from service.telemetry.access_log import AccessLog
from service.telemetry.request_events import RequestEvent, Sampling

if TYPE_CHECKING:
    from service.telemetry.spans import Traces

logger = logging.getLogger(__name__)

LOGGED = Sampling(logged=True, trace_id=0)


def logging_and_tracing(settings: Settings) -> "LoggingAndTracing":
    scheme = "http" if settings.tls.cert is None else "https"
    return LoggingAndTracing(
        AccessLog(settings.access_log, settings.slow_seconds), tracing.from_environment(scheme)
    )


class LoggingAndTracing:
    def __init__(self, log: AccessLog, traces: "Traces | None" = None) -> None:
        self._log = log
        self._traces = traces
        self.tracing = traces is not None
        self.watching = log.watching or self.tracing

    def wanted(
        self,
        status: int,
        seconds: float,
        traceparent: str | bytes | None = None,
        tracestate: str | bytes | None = None,
    ) -> Sampling | None:
        traces = self._traces
        if traces is None:
            return LOGGED if self._log.wants(status, seconds) else None
        trace_id, recorded = traces.decide(_text(traceparent), _text(tracestate))
        logged = self._log.wants_traced(status, seconds, trace_id)
        if logged or recorded:
            return Sampling(logged, trace_id if recorded else 0)
        return None

    def finished(self, event: RequestEvent) -> None:
        wanted = event.wanted
        try:
            if wanted is None:
                seconds = event.finished - event.arrived
                wanted = self.wanted(event.status, seconds, event.traceparent, event.tracestate)
                if wanted is None:
                    return
            if wanted.trace_id and self._traces is not None:
                self._traces.record(event, wanted.trace_id)
            if wanted.logged:
                self._log.write(event, wanted.trace_id)
        except Exception:  # the request must not suffer from it
            logger.exception("A request to %s could not be written down.", event.route)

    def close(self) -> None:
        if self._traces is not None:
            self._traces.close()


def _text(value: str | bytes | None) -> str | None:
    return value.decode("latin-1") if isinstance(value, bytes) else value
