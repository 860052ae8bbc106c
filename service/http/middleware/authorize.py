"""Asks of every request that does not take a hot path whether its sender may make it."""

from starlette.applications import Starlette
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from service.http import problems
from service.http.auth.access import Access, Forbidden, Unauthorized


class Authorize:
    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._access.check(scope["method"], scope["path"], scope["headers"])
        except (Unauthorized, Forbidden) as denied:
            # Where there are no keys there is no secret about what exists: 404 and 405 say more.
            if _find_route(scope) or self._access.closed:
                await problems.of_failure(denied, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _find_route(scope: Scope) -> bool:
    """Whether there is something to be done; its route is noted for the metrics."""
    app: Starlette = scope["app"]
    for route in app.routes:
        match, found = route.matches(scope)
        if match == Match.FULL:
            scope.update(found)
            return True
    return False
