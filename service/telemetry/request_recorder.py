"""Records requests: in the access log, and as traces if the environment asks for them."""

import logging
from typing import TYPE_CHECKING

from service.settings import Settings
from service.telemetry import tracing
from service.telemetry.access_log import AccessLog
from service.telemetry.request_events import RequestEvent, Sampling

if TYPE_CHECKING:
    from service.telemetry.spans import Traces

logger = logging.getLogger(__name__)

LOGGED_ONLY = Sampling(logged=True, trace_id=0)


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
        self.records_successes = log.logs_successes or self.tracing

    def sample(
        self,
        status: int,
        seconds: float,
        traceparent: str | bytes | None = None,
        tracestate: str | bytes | None = None,
    ) -> Sampling | None:
        traces = self._traces
        if traces is None:
            return LOGGED_ONLY if self._log.is_logged(status, seconds) else None
        trace_id, recorded = traces.decide(_text(traceparent), _text(tracestate))
        logged = self._log.is_logged_by_trace(status, seconds, trace_id)
        if logged or recorded:
            return Sampling(logged, trace_id if recorded else 0)
        return None

    def record(self, event: RequestEvent) -> None:
        sampling = event.sampling
        try:
            if sampling is None:
                seconds = event.finished - event.arrived
                sampling = self.sample(event.status, seconds, event.traceparent, event.tracestate)
                if sampling is None:
                    return
            if sampling.trace_id and self._traces is not None:
                self._traces.record(event, sampling.trace_id)
            if sampling.logged:
                self._log.write(event, sampling.trace_id)
        except Exception:  # the request must not fail by it
            logger.exception(
                "A request to %s could not be logged or traced; it was answered.", event.route
            )

    def close(self) -> None:
        if self._traces is not None:
            self._traces.close()


def _text(value: str | bytes | None) -> str | None:
    return value.decode("latin-1") if isinstance(value, bytes) else value
