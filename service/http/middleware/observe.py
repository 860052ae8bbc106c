"""Observes the requests that FastAPI's routes answer; makes an unforeseen failure a 500."""

import logging
from time import perf_counter
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http import problems
from service.http.health import PROBES
from service.http.observer import ID_HEADER, ObservedRequest, read_trace_headers
from service.telemetry import request_ids
from service.telemetry.metrics.registry import Metrics
from service.telemetry.request_events import RequestRecorder

logger = logging.getLogger(__name__)

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


class ObserveRequests:
    def __init__(self, app: ASGIApp, metrics: Metrics, recorder: RequestRecorder) -> None:
        self._app = app
        self._metrics = metrics
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = RoutedRequest(scope, send, self._metrics, self._recorder)
        current = request_ids.current.set(request.request_id.decode())
        try:
            await self._app(scope, receive, request.send)
        except ClientDisconnect:
            logger.debug("A client left before its request was complete.")
        except Exception as error:
            logger.exception("%s %s failed.", request.method, request.route)
            if request.status:
                raise
            scope[problems.REASON] = problems.reason(error)
            await problems.of_unknown_failure(scope["path"])(scope, receive, request.send)
        finally:
            request.end()
            request_ids.current.reset(current)


class RoutedRequest(ObservedRequest):
    """A request, and what has been sent to answer it."""

    def __init__(
        self, scope: Scope, send: Send, metrics: Metrics, recorder: RequestRecorder
    ) -> None:
        super().__init__(metrics, recorder, read_trace_headers(scope["headers"]))
        self._scope = scope
        self._send = send
        self._bytes_out = 0
        self.method = scope["method"] if scope["method"] in METHODS else "other"
        self.status = 0  # nothing was sent yet

    @property
    def route(self) -> str:
        """The route's template; a raw path would let clients make up metric labels without end."""
        return getattr(self._scope.get("route"), "path", "unmatched")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (ID_HEADER, self.request_id)]
            self.count(self.route, self.method, self.status)
        else:
            self._bytes_out += len(message.get("body", b""))
        await self._send(message)

    def end(self) -> None:
        failed_probe = self.status == 503 and self._scope["path"] in PROBES
        if not self.status or (failed_probe and not self._recorder.records_successes):
            return  # a probe that fails is asked again and again
        self.record(self.status, perf_counter())

    def details(self) -> dict[str, Any]:
        length = dict(self._scope["headers"]).get(b"content-length", b"")
        return {
            "route": self.route,
            "method": self.method,
            "reason": self._scope.get(problems.REASON),
            "bytes_in": int(length) if length.isdigit() else 0,
            "bytes_out": self._bytes_out,
            "path": self._scope["path"],
        }
