"""Failures as application/problem+json (RFC 9457): a table says which kind has which status."""

import re
from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from urllib.parse import quote

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from service.errors import DSSError, Kind

MEDIA_TYPE = "application/problem+json"
# The Open Inference Protocol has its own form of a problem.
V2 = "/v2/"
V2_MEDIA_TYPE = "application/json"
RETRY_SECONDS = "1"
REASON = "dss.reason"  # in a request's scope: why it failed, for the log

STATUS: Mapping[Kind, HTTPStatus] = {
    Kind.BAD_REQUEST: HTTPStatus.BAD_REQUEST,
    Kind.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    Kind.DENIED: HTTPStatus.FORBIDDEN,
    Kind.MISDIRECTED: HTTPStatus.MISDIRECTED_REQUEST,
    Kind.NOT_FOUND: HTTPStatus.NOT_FOUND,
    Kind.NOT_ACCEPTABLE: HTTPStatus.NOT_ACCEPTABLE,
    Kind.SLOW_REQUEST: HTTPStatus.REQUEST_TIMEOUT,
    Kind.CONFLICT: HTTPStatus.CONFLICT,
    Kind.TOO_LARGE: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    Kind.UNSUPPORTED_MEDIA: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    Kind.INVALID: HTTPStatus.UNPROCESSABLE_ENTITY,
    Kind.OVERLOADED: HTTPStatus.TOO_MANY_REQUESTS,
    Kind.FAILED: HTTPStatus.INTERNAL_SERVER_ERROR,
    Kind.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    Kind.TIMEOUT: HTTPStatus.GATEWAY_TIMEOUT,
}
WORTH_RETRYING = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


def add_handlers(app: FastAPI) -> None:
    async def on_failure(request: Request, error: Exception) -> Response:
        request.scope[REASON] = reason(error)
        return of_failure(error, request.scope["path"])

    async def on_http_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        detail = {
            HTTPStatus.NOT_FOUND: "There is nothing at this path.",
            HTTPStatus.METHOD_NOT_ALLOWED: "This path does not have this method.",
        }.get(HTTPStatus(error.status_code), str(error.detail))
        headers = dict(error.headers or {})
        path = request.scope["path"]
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = ", ".join(_methods(app, path))
        return problem(error.status_code, detail, path, headers=headers)

    app.add_exception_handler(DSSError, on_failure)
    app.add_exception_handler(HTTPException, on_http_error)


def _methods(app: FastAPI, path: str) -> list[str]:
    """The methods of all routes that match a path; the router itself looks at the first only."""
    matching = (
        route.methods
        for route in app.routes
        if isinstance(route, Route) and route.methods and route.path_regex.match(path)
    )
    return sorted(set().union(*matching))


def of_failure(error: Exception, path: str) -> Response:
    """The answer to a named failure; raises one that clients are not told of."""
    kind = error.kind if isinstance(error, DSSError) else None
    if kind is None:
        raise error
    if kind is Kind.OVERLOADED:  # there is no time to lose
        return Ready(*_made_before(kind, reason(error), str(error), path))
    return _of_kind(kind, reason(error), str(error), path)


def _of_kind(kind: Kind, named: str, detail: str, path: str) -> Response:
    status = STATUS[kind]
    headers = {"Retry-After": RETRY_SECONDS} if status in WORTH_RETRYING else {}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="dss"'
    slug = named.replace("_", "-")
    title = slug.replace("-", " ").capitalize()
    return problem(
        status, detail, path, kind=f"urn:dss:problem:{slug}", title=title, headers=headers
    )


@lru_cache(maxsize=256)
def _made_before(
    kind: Kind, named: str, detail: str, path: str
) -> tuple[int, tuple[tuple[bytes, bytes], ...], bytes]:
    made = _of_kind(kind, named, detail, path)
    return made.status_code, tuple(made.raw_headers), bytes(made.body)


def of_unknown_failure(path: str) -> Response:
    return problem(500, "The server failed to answer; its log says why.", path)


def reason(error: Exception) -> str:
    """The failure's name, for a metric's label: QueueFull is queue_full."""
    return _snake_case(type(error).__name__)


@lru_cache(maxsize=256)
def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Ready(Response):
    """A response whose status line, headers and content are known already."""

    def __init__(self, status: int, headers: tuple[tuple[bytes, bytes], ...], body: bytes) -> None:
        self.status_code = status
        self.raw_headers = [*headers]
        self.body = body
        self.background = None


def problem(
    status: int,
    detail: str,
    path: str,
    *,
    kind: str = "about:blank",
    title: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    if f"{path}/".startswith(V2):
        return Response(orjson.dumps({"error": detail}), status, headers, V2_MEDIA_TYPE)
    body = {
        "type": kind,
        "title": title or HTTPStatus(status).phrase,
        "status": int(status),
        "detail": detail,
        "instance": quote(path),
    }
    return Response(orjson.dumps(body), status, headers, MEDIA_TYPE)
