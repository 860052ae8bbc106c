"""Holds a request to the limits: while its body arrives, and once its arrays are known."""

import asyncio

from starlette.requests import Request

from service.errors import DSSError, KOutOfRange
from service.settings import Limits


class BodyTooLarge(DSSError):
    pass


class BodyTimeout(DSSError):
    pass


class TooManyRows(DSSError):
    pass


class TooManyAnswers(DSSError):
    """Rows times k: the answer would be too large."""


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body, refused as soon as it is known to be too large, whatever its head announced."""
    too_large = BodyTooLarge(f"The body is larger than {limits.max_body_bytes} bytes.")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:20]) > limits.max_body_bytes:
        raise too_large
    chunks = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.max_body_bytes:
                    raise too_large
                chunks.append(chunk)
    except TimeoutError:
        raise BodyTimeout(f"The body took longer than {limits.body_seconds:g} seconds.") from None
    return b"".join(chunks)


def check(rows: int, k: int, limits: Limits) -> None:
    if rows > limits.max_rows:
        raise TooManyRows(f"The request has {rows} rows; at most {limits.max_rows} are answered.")
    if k > limits.max_k:
        raise KOutOfRange(f"k is {k}; this server answers at most {limits.max_k}.")
    if rows * k > limits.max_answers:
        raise TooManyAnswers(
            f"{rows} rows with k = {k} ask for {rows * k} answers;"
            f" one request may have {limits.max_answers}."
        )
