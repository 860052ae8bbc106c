"""Reads a request's body within the limits: size, time, and what all connections hold together."""

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from service.errors import DSSError, Kind
from service.http import codecs
from service.http.codecs import UnsupportedMediaType
from service.http.fields import InvalidField
from service.settings import Limits

LARGE_SHARE = 0.5  # of what all may hold together: the rest is for small requests
OBJECT_BYTES = 65_536  # of a body that is no query
JSON = "application/json"
FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")


class BodyTooLarge(DSSError):
    kind = Kind.TOO_LARGE


class BodyTimeout(DSSError):
    kind = Kind.SLOW_REQUEST


class TooManyBytes(DSSError):
    """Other clients' bodies and answers take up all the room there is."""

    kind = Kind.OVERLOADED


class ByteBudget:
    """Bytes that connections hold together: bodies on their way in, answers not yet read."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0

    def take(self, size: int) -> None:
        if self.taken + size > self.most:  # also by answers, which are counted when they are there
            raise TooManyBytes("The server holds as many bytes as it may; try again soon.")
        self.taken += size

    def take_large(self, size: int) -> None:
        self.check_large(size)
        self.taken += size

    def check_large(self, size: int) -> None:
        """Of one large body or answer: those may take half of the room, or be alone."""
        if self.taken and self.taken + size > self.most * LARGE_SHARE:
            raise TooManyBytes("The server holds many large bodies and answers; try again soon.")

    def check(self) -> None:
        """Raises TooManyBytes if nothing more may be held."""
        if self.taken > self.most:
            self.take(0)

    def give_back(self, size: int) -> None:
        self.taken -= size


async def read_body(
    receive: Receive,
    announced: bytes | None,
    limits: Limits,
    budget: ByteBudget,
    max_bytes: int | None = None,
) -> bytes:
    """Refuses a body as soon as it is known to be too large, whatever its head announced."""
    max_bytes = limits.max_body_bytes if max_bytes is None else max_bytes
    if announced is not None and announced.isdigit() and int(announced[:20]) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk = message.get("body", b"")
                if size + len(chunk) > max_bytes:
                    raise _too_large(max_bytes)
                if not chunks and not message.get("more_body", False):
                    return bytes(chunk)  # it has arrived together with its head
                budget.take(len(chunk))
                size += len(chunk)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise BodyTimeout(f"The body took longer than {limits.body_seconds:g} seconds.") from None
    finally:
        budget.give_back(size)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {max_bytes} bytes.")


async def read_object(
    request: Request, limits: Limits, budget: ByteBudget, *, optional: bool = False
) -> dict[str, Any]:
    """A small JSON object, of a request that changes something; no body is an empty one."""
    _check_json(request)
    announced = request.headers.get("content-length")
    length = None if announced is None else announced.encode("latin-1")
    max_bytes = min(OBJECT_BYTES, limits.max_body_bytes)
    body = await read_body(request.receive, length, limits, budget, max_bytes)
    if optional and not body:
        return {}
    document = codecs.parse_json(body)
    if not isinstance(document, dict):
        raise InvalidField("The body must be a JSON object.")
    return document


def _check_json(request: Request) -> None:
    """Refuses what a page of another origin can have a browser send without asking first.

    That is a POST that is said to be a form or text; for any other method a browser asks first.
    Clients that are no browsers may say of text what they like.
    """
    if request.method != "POST":
        return
    said = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    from_page = any(name in request.headers for name in ("origin", "referer", "sec-fetch-site"))
    if said in FORMS or (said == "text/plain" and from_page):
        raise UnsupportedMediaType(f"The body must be {JSON}.")
