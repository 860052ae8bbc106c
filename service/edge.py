"""Around all that is not hot: counts every answer, and turns an unknown failure into a 500."""

import logging
from time import perf_counter

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import problems
from service.metrics import Metrics

logger = logging.getLogger(__name__)

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


class Edge:
    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived = perf_counter()
        started = False

        async def counting_send(message: Message) -> None:
            # Counted before it leaves, so that a client that has its answer finds it counted.
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._count(scope, message["status"], perf_counter() - arrived)
            await send(message)

        try:
            await self._app(scope, receive, counting_send)
        except ClientDisconnect:
            logger.debug("A client left before its request was complete.")
        except Exception:
            logger.exception("%s %s failed.", scope["method"], _route(scope))
            if started:
                raise
            await problems.of_unknown_failure(scope)(scope, receive, counting_send)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._metrics.http.answered(_route(scope), method, status, seconds)


def _route(scope: Scope) -> str:
    """The route's template; a raw path would let clients make up labels without end."""
    route = scope.get("route")
    return getattr(route, "path", "unmatched")
