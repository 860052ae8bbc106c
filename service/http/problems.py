"""Failures as application/problem+json (RFC 9457): one table says which failure is which status."""

import asyncio
import contextlib
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
from starlette.types import Receive, Scope, Send

from service.errors import DSSError, NotSupported, QueryError
from service.http.auth.access import Forbidden, Unauthorized
from service.http.body import BodyTimeout, BodyTooLarge, TooManyAnswers, TooManyBytes, TooManyRows
from service.http.codecs import MalformedBody, NotAcceptable, UnsupportedMediaType
from service.http.compression import BodyGrowsTooLarge
from service.http.health import NotReady
from service.http.routes.aside import TooManySearches
from service.npy import MalformedNpy
from service.repository.catalog import Loading, ModelNotFound, VersionNotFound
from service.repository.class_index import ClassNotFound, ExpertNotFound
from service.repository.manager import LoadFailed, WorkersBehind
from service.repository.version_labels import LabelNotFound, LabelNotMoved
from service.topk import DeadlineExceeded, EngineFailed, EngineStopped, QueueFull

MEDIA_TYPE = "application/problem+json"
# The Open Inference Protocol has its own kind of problem.
V2 = "/v2/"
V2_MEDIA_TYPE = "application/json"
RETRY_SECONDS = "1"
REASON = "dss.reason"  # in a request's scope: why it was refused, for the log
LINGER_SECONDS = 1.0

# A failure that is neither listed nor derived from one is not meant for clients: it becomes a 500.
STATUS: Mapping[type[object], HTTPStatus] = {
    MalformedBody: HTTPStatus.BAD_REQUEST,
    MalformedNpy: HTTPStatus.BAD_REQUEST,
    Unauthorized: HTTPStatus.UNAUTHORIZED,
    Forbidden: HTTPStatus.FORBIDDEN,
    ModelNotFound: HTTPStatus.NOT_FOUND,
    VersionNotFound: HTTPStatus.NOT_FOUND,
    LabelNotFound: HTTPStatus.NOT_FOUND,
    ExpertNotFound: HTTPStatus.NOT_FOUND,
    ClassNotFound: HTTPStatus.NOT_FOUND,
    NotAcceptable: HTTPStatus.NOT_ACCEPTABLE,
    BodyTimeout: HTTPStatus.REQUEST_TIMEOUT,
    NotSupported: HTTPStatus.BAD_REQUEST,
    LoadFailed: HTTPStatus.BAD_REQUEST,
    LabelNotMoved: HTTPStatus.CONFLICT,
    BodyTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    BodyGrowsTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    TooManyRows: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    TooManyAnswers: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    UnsupportedMediaType: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    QueryError: HTTPStatus.UNPROCESSABLE_ENTITY,
    QueueFull: HTTPStatus.TOO_MANY_REQUESTS,
    TooManyBytes: HTTPStatus.TOO_MANY_REQUESTS,
    TooManySearches: HTTPStatus.TOO_MANY_REQUESTS,
    EngineFailed: HTTPStatus.INTERNAL_SERVER_ERROR,
    EngineStopped: HTTPStatus.SERVICE_UNAVAILABLE,
    Loading: HTTPStatus.SERVICE_UNAVAILABLE,
    NotReady: HTTPStatus.SERVICE_UNAVAILABLE,
    DeadlineExceeded: HTTPStatus.GATEWAY_TIMEOUT,
    WorkersBehind: HTTPStatus.GATEWAY_TIMEOUT,
}
WORTH_RETRYING = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


def add_handlers(app: FastAPI) -> None:
    async def on_failure(request: Request, error: Exception) -> Response:
        return of_failure(error, request.scope)

    async def on_http_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        detail = {
            HTTPStatus.NOT_FOUND: "There is nothing at this path.",
            HTTPStatus.METHOD_NOT_ALLOWED: "This path does not have this method.",
        }.get(HTTPStatus(error.status_code), str(error.detail))
        headers = dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = ", ".join(_methods(app, request.scope["path"]))
        return problem(error.status_code, detail, request.scope, headers=headers)

    app.add_exception_handler(DSSError, on_failure)
    app.add_exception_handler(HTTPException, on_http_error)


def _methods(app: FastAPI, path: str) -> list[str]:
    """Of all routes that a path has; the router itself knows of the first."""
    matching = (
        route.methods
        for route in app.routes
        if isinstance(route, Route) and route.methods and route.path_regex.match(path)
    )
    return sorted(set().union(*matching))


def of_failure(error: Exception, scope: Scope) -> Response:
    """The answer to a named failure; one that clients must not see is raised again."""
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), None)
    if status is None:
        raise error
    scope[REASON] = reason(error)
    headers = {"Retry-After": RETRY_SECONDS} if status in WORTH_RETRYING else {}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="dss"'
    slug = reason(error).replace("_", "-")
    answer = problem(
        status,
        str(error),
        scope,
        kind=f"urn:dss:problem:{slug}",
        title=slug.replace("-", " ").capitalize(),
        headers=headers,
    )
    return answer


def of_unknown_failure(scope: Scope) -> Response:
    return problem(500, "The server failed to answer; its log says why.", scope)


def reason(error: Exception) -> str:
    """The failure's name, for a metric's label: QueueFull is queue_full."""
    return _snake_case(type(error).__name__)


@lru_cache(maxsize=256)
def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Ready(Response):
    """A response of which everything is known already."""

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.status_code = status
        self.raw_headers = headers
        self.body = body
        self.background = None


def of_full_queue(error: QueueFull, path: str) -> Ready:
    """The same as `of_failure`, for the moment when there is no time to lose."""
    status, headers, body = _of_full_queue(str(error), path)
    return Ready(status, [*headers], body)


@lru_cache(maxsize=256)
def _of_full_queue(text: str, path: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    made = of_failure(QueueFull(text), {"path": path})
    return made.status_code, made.raw_headers, bytes(made.body)


def problem(
    status: int,
    detail: str,
    scope: Scope,
    *,
    kind: str = "about:blank",
    title: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    if f"{scope['path']}/".startswith(V2):
        return Response(orjson.dumps({"error": detail}), status, headers, V2_MEDIA_TYPE)
    body = {
        "type": kind,
        "title": title or HTTPStatus(status).phrase,
        "status": int(status),
        "detail": detail,
        "instance": quote(scope["path"]),
    }
    return Response(orjson.dumps(body), status, headers, MEDIA_TYPE)


class EarlyAnswer(Response):
    """Answers at once although the body is still arriving, and then closes the connection.

    Closing with bytes unread makes TCP reset the connection, which can cost the client the answer
    it has not read yet. So the rest of the body is thrown away for a moment first.
    """

    def __init__(self, answer: Response) -> None:
        headers = {**answer.headers, "connection": "close"}
        super().__init__(answer.body, answer.status_code, headers, answer.media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await send({"type": "http.response.body", "body": bytes(self.body), "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})
