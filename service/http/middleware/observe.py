"""Around all that is not hot: names each request and counts, logs and traces its answer.

A failure nobody has foreseen becomes a 500.
"""

import logging
from time import perf_counter

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http import problems
from service.http.auth.access import PROBES
from service.telemetry import request_ids
from service.telemetry.metrics.registry import Metrics
from service.telemetry.request_events import RequestEvent, RequestRecorder

logger = logging.getLogger(__name__)

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


class ObserveRequests:
    def __init__(self, app: ASGIApp, metrics: Metrics, journal: RequestRecorder) -> None:
        self._app = app
        self._metrics = metrics
        self._journal = journal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answering = Answering(scope, send, self._metrics)
        handled = request_ids.current.set(answering.request_id.decode())
        try:
            await self._app(scope, receive, answering.send)
        except ClientDisconnect:
            logger.debug("A client left before its request was complete.")
        except Exception as error:
            logger.exception("%s %s failed.", answering.method, _route(scope))
            if answering.status:
                raise
            scope[problems.REASON] = problems.reason(error)
            await problems.of_unknown_failure(scope)(scope, receive, answering.send)
        finally:
            answering.tell(self._journal)
            request_ids.current.reset(handled)


class Answering:
    """One request, and what has been sent to answer it."""

    def __init__(self, scope: Scope, send: Send, metrics: Metrics) -> None:
        self._scope = scope
        self._send = send
        self._metrics = metrics
        self._arrived = perf_counter()
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._size = 0
        self.request_id = request_ids.accepted(self._headers.get(request_ids.HEADER))
        self.method = scope["method"] if scope["method"] in METHODS else "other"
        self.status = 0  # nothing was sent yet

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            named = (request_ids.HEADER, self.request_id)
            message["headers"] = [*message.get("headers", ()), named]
            # Counted before it leaves, so that a client that has its answer finds it counted.
            seconds = perf_counter() - self._arrived
            self._metrics.http.answered(_route(self._scope), self.method, self.status, seconds)
        else:
            self._size += len(message.get("body", b""))
        await self._send(message)

    def tell(self, journal: RequestRecorder) -> None:
        if not self.status or not (journal.watching or self.status >= 500):
            return
        if self.status == 503 and self._scope["path"] in PROBES and not journal.watching:
            return  # a probe that fails is asked again and again
        finished = perf_counter()
        traceparent, tracestate = self._text(b"traceparent"), self._text(b"tracestate")
        wanted = journal.wanted(self.status, finished - self._arrived, traceparent, tracestate)
        if wanted is None:
            return
        length = self._headers.get(b"content-length", b"")
        journal.finished(
            RequestEvent(
                route=_route(self._scope),
                method=self.method,
                status=self.status,
                request_id=self.request_id.decode(),
                traceparent=traceparent,
                tracestate=tracestate,
                arrived=self._arrived,
                finished=finished,
                reason=self._scope.get(problems.REASON),
                bytes_in=int(length) if length.isdigit() else 0,
                bytes_out=self._size,
                path=self._scope["path"],
                wanted=wanted,
            )
        )

    def _text(self, header: bytes) -> str | None:
        value = self._headers.get(header)
        return None if value is None else value.decode("latin-1")


def _route(scope: Scope) -> str:
    """The route's template; a raw path would let clients make up labels without end."""
    route = scope.get("route")
    return getattr(route, "path", "unmatched")
