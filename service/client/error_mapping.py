"""Maps what went wrong, a reply's status or a broken connection, to the client's named errors."""

import os
import re
import ssl
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus

import orjson

from service.client.address import Address
from service.client.deadline import Deadline
from service.client.errors import (
    AnswerMalformed,
    ClientError,
    DeadlineExceeded,
    Dropped,
    ModelNotFound,
    NotAuthorized,
    NotTrusted,
    Overloaded,
    PartTooLarge,
    Problem,
    QueryRefused,
    ServerFailed,
    Unavailable,
    WrongAddress,
)
from service.client.http1 import NOT_HTTP, Reply

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
RETRIED = (Overloaded, Unavailable)
NOT_FOUND = re.compile(r"urn:dss:problem:(model|version|label)-not-found")


# --- replies ---------------------------------------------------------------------------------


def status_error(reply: Reply, address: Address, *, with_key: bool) -> ClientError:
    """The error of a reply whose status is not 200."""
    problem = _problem(reply)
    status = reply.status
    sentence = problem.detail or f"{address.url} answered with status {status} ({_phrase(status)})."
    if status == 401:
        sentence = f"{address.url} wants an API key: pass api_key=, or set DSS_API_KEY."
        if with_key:
            sentence = f"{address.url} does not know this API key."
    elif status == 404 and not NOT_FOUND.fullmatch(problem.type or ""):
        sentence = f"{address.url} has no such path: it may not be a server of this project."
        return WrongAddress(sentence, problem)
    elif status == 404:
        return ModelNotFound(sentence, problem)
    elif 300 <= status < 400:
        sentence = (
            f"{address.url} redirects to {reply.header(b'location')!r:.200}: pass that as the URL."
        )
        return WrongAddress(sentence, problem)
    return _kind(status)(sentence, problem)


def _kind(status: int) -> type[ClientError]:
    if status in KINDS:
        return KINDS[status]
    if status >= 500:
        return ServerFailed
    return QueryRefused if status >= 400 else AnswerMalformed


def _problem(reply: Reply) -> Problem:
    """What the problem document says; a proxy's reply may have none."""
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
        return "unknown to HTTP"


def retry_after(reply: Reply, now: float) -> float:
    """The seconds of a reply's Retry-After header; `now` is the time of day."""
    value = reply.header(b"retry-after").strip()
    if value.isdecimal():
        return float(value[:9])
    try:
        return max(parsedate_to_datetime(value).timestamp() - now, 0.0)
    except (ValueError, OverflowError):
        return 0.0


# --- connections -----------------------------------------------------------------------------


def connect_error(address: Address, error: OSError, deadline: Deadline) -> ClientError:
    """The error of a connection that could not be made."""
    if isinstance(error, TimeoutError):
        return deadline.exceeded()
    if isinstance(error, ssl.SSLCertVerificationError):
        return NotTrusted(
            f"The certificate of {address.url} is not trusted ({error.verify_message}):"
            " verify= takes the file of its authority, or an ssl.SSLContext."
        )
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return NotTrusted(f"No TLS is spoken with {address.url} ({error.reason}).")
    return Unavailable(f"No server answers at {address.url} ({_reason(error)}).")


def _reason(error: OSError) -> str:
    """The system's words for it: asyncio and sockets have words of their own."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


def exchange_error(
    address: Address, error: Exception, deadline: Deadline, *, reused: bool
) -> ClientError:
    """The error of a request that got no whole reply on its connection."""
    if isinstance(error, TimeoutError):
        return deadline.exceeded()
    if isinstance(error, NOT_HTTP):
        return AnswerMalformed(f"What answers at {address.url} speaks no HTTP ({error}).")
    if isinstance(error, ssl.SSLError) and not isinstance(
        error, ssl.SSLEOFError | ssl.SSLZeroReturnError
    ):
        return NotTrusted(f"The TLS connection to {address.url} failed ({error.reason}).")
    return Dropped(
        f"{address.url} ended the connection before its answer was whole.", reused=reused
    )
