"""Which failure a reply with another status than 200 is, and when to try again."""

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus

import orjson

from service.client.errors import (
    AnswerMalformed,
    ClientError,
    DeadlineExceeded,
    ModelNotFound,
    NotAuthorized,
    Overloaded,
    PartTooLarge,
    Problem,
    QueryRefused,
    ServerFailed,
    Unavailable,
    WrongAddress,
)
from service.client.http1 import Address, Reply

KINDS: Mapping[int, type[ClientError]] = {
    401: NotAuthorized,
    403: NotAuthorized,
    408: DeadlineExceeded,
    413: PartTooLarge,
    429: Overloaded,
    502: Unavailable,
    503: Unavailable,
    504: DeadlineExceeded,
}
WORTH_ANOTHER_TRY = (Overloaded, Unavailable)
NOT_FOUND = re.compile(r"urn:dss:problem:(model|version|label)-not-found")


def failure(reply: Reply, where: Address, *, with_key: bool) -> ClientError:
    problem = _problem(reply)
    status = reply.status
    said = problem.detail or f"{where.url} answered with status {status} ({_phrase(status)})."
    if status == 401:
        said = f"{where.url} wants an API key: pass api_key=, or set DSS_API_KEY."
        if with_key:
            said = f"{where.url} does not know this API key."
    elif status == 404 and not NOT_FOUND.fullmatch(problem.type or ""):
        said = f"{where.url} has no such path: it may not be a service of this project."
        return WrongAddress(said, problem)
    elif status == 404:
        return ModelNotFound(said, problem)
    elif 300 <= status < 400:
        said = f"{where.url} sends elsewhere: {reply.header(b'location')!r:.200} may be the URL."
        return WrongAddress(said, problem)
    return _kind(status)(said, problem)


def _kind(status: int) -> type[ClientError]:
    if status in KINDS:
        return KINDS[status]
    if status >= 500:
        return ServerFailed
    return QueryRefused if status >= 400 else AnswerMalformed


def _problem(reply: Reply) -> Problem:
    """What the document says, if there is one: a proxy may have answered."""
    request_id = reply.header(b"x-request-id") or None
    try:
        document = orjson.loads(reply.body)
    except orjson.JSONDecodeError:
        document = None
    if not isinstance(document, dict):
        return Problem(reply.status, request_id=request_id)
    texts = {name: _text(document.get(name)) for name in ("type", "title", "detail")}
    return Problem(reply.status, request_id=request_id, **texts)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "which HTTP does not have"


def retry_after(reply: Reply, now: float) -> float:
    """Seconds for which the server wants to be left alone; `now` is the time of day."""
    value = reply.header(b"retry-after").strip()
    if value.isdecimal():
        return float(value[:9])
    try:
        return max(parsedate_to_datetime(value).timestamp() - now, 0.0)
    except (ValueError, OverflowError):
        return 0.0
