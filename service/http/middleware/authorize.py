"""Lets a request pass if its key has what the route needs (`auth/access.py`)."""

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from service.http import problems
from service.http.auth.access import DENIED, Access, needs_of


class Authorize:
    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = _find_route(scope)
        # Where there are no keys there is no secret about what exists: 404 and 405 say more.
        if route is not None or self._access.closed:
            try:
                needs = needs_of(getattr(route, "endpoint", None), scope["method"])
                self._access.check(needs, scope["headers"])
            except DENIED as denied:
                scope[problems.REASON] = problems.reason(denied)
                await problems.of_failure(denied, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _find_route(scope: Scope) -> BaseRoute | None:
    """The route that answers, if there is one; it is noted for the metrics."""
    app: Starlette = scope["app"]
    for route in app.routes:
        match, found = route.matches(scope)
        if match == Match.FULL:
            scope.update(found)
            return route
    return None
