"""Holds a request to the limits: while its body arrives, and once its arrays are known."""

import asyncio
from collections.abc import Awaitable, Coroutine, Generator, MutableMapping
from types import coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

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


class TooManyBytes(DSSError):
    """Other clients' bodies and answers take up all the room there is."""


class ByteBudget:
    """Bytes that connections hold together: bodies on their way in, answers not yet read."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0

    def take(self, size: int) -> None:
        if self.taken + size > self.most:  # also by answers, which are counted when they are there
            raise TooManyBytes("The server holds as many bytes as it may; try again soon.")
        self.taken += size

    def give_back(self, size: int) -> None:
        self.taken -= size


def read_body(
    receive: Receive, announced: bytes | None, limits: Limits, budget: ByteBudget
) -> bytes | Coroutine[Any, Any, bytes]:
    """The body, or what to await for it if it has not arrived together with its head.

    It is refused as soon as it is known to be too large, whatever its head announced.
    """
    most = limits.max_body_bytes
    if announced is not None and announced.isdigit() and int(announced[:20]) > most:
        raise _too_large(limits)
    step = receive().__await__()
    try:
        pending = next(step)
    except StopIteration as arrived:
        message = arrived.value
        if message.get("more_body", False) or message["type"] != "http.request":
            return _rest(message, receive, limits, budget)
        body: bytes = message.get("body", b"")
        if len(body) > most:
            raise _too_large(limits) from None
        return body
    return _rest(_resumed(step, pending), receive, limits, budget)


async def _rest(
    first: Message | Awaitable[Message], receive: Receive, limits: Limits, budget: ByteBudget
) -> bytes:
    """The chunks from the first on, as long as they come in time."""
    chunks = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            message = first if isinstance(first, MutableMapping) else await first
            while True:
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk = message.get("body", b"")
                if size + len(chunk) > limits.max_body_bytes:
                    raise _too_large(limits)
                budget.take(len(chunk))
                size += len(chunk)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
                message = await receive()
    except TimeoutError:
        raise BodyTimeout(f"The body took longer than {limits.body_seconds:g} seconds.") from None
    finally:
        budget.give_back(size)


@coroutine
def _resumed(step: Generator[Any, Any, Message], pending: object) -> Generator[Any, Any, Message]:
    """What `step` comes to, after it has said once that it waits for `pending`."""
    try:
        yield pending
    except BaseException:
        step.close()
        raise
    return (yield from step)


def _too_large(limits: Limits) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {limits.max_body_bytes} bytes.")


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
