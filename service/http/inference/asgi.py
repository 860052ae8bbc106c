"""Answers an inference request as ASGI brings it: piece by piece, from any server."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from service.http.body import BodyTimeout, BodyTooLarge, ByteBudget, TooManyBytes, read_body
from service.http.inference.handler import Header, InferenceHandler
from service.http.inference.request import InferenceRequest, Outcome, Pending
from service.http.inference.routes import NEEDS, Place
from service.http.observer import read_trace_headers
from service.topk import QueueFull

logger = logging.getLogger(__name__)

LINGER_SECONDS = 1.0
# Failures that do not wait for the rest of a body, which may be long or never come.
NO_ROOM = (QueueFull, TooManyBytes)
LEAVE_BODY = (*NO_ROOM, BodyTimeout, BodyTooLarge)


async def answer(
    handler: InferenceHandler[Any], place: Place, scope: Scope, receive: Receive, send: Send
) -> None:
    headers, state = scope["headers"], handler.state
    request = InferenceRequest(handler, place, scope["path"], read_trace_headers(headers))
    try:
        state.access.check(NEEDS, headers)
        request.find_model()
        head = handler.read_request_head(headers, scope["query_string"])
        request.admit()
        body = await read_body(receive, head.length, state.settings.limits, state.budget)
    except ClientDisconnect:
        logger.debug("A client left before its request was complete.")
        return
    except Exception as error:
        outcome = request.fail(error)
        if isinstance(error, LEAVE_BODY) and not await _body_has_arrived(error, headers, receive):
            await _send_early(outcome, receive, send)
        else:
            await _send(outcome, send, state.budget)
        return
    step = request.respond(head, body)
    while isinstance(step, asyncio.Future):
        if not await _settled(step, receive):
            logger.debug("A client left before its answer was there.")
            return
        step = request.complete(head, step)
    outcome = step
    del request, body, step  # the client may take long to read what came of them
    await _send(outcome, send, state.budget)


async def _body_has_arrived(error: Exception, headers: Iterable[Header], receive: Receive) -> bool:
    """Whether the connection can be kept although the body was not read."""
    if not isinstance(error, NO_ROOM) or any(name == b"expect" for name, _ in headers):
        return False  # a client that waits for "100 Continue" must not be sent it
    try:
        async with asyncio.timeout(0):
            return not (await receive()).get("more_body", False)
    except TimeoutError:
        return False


async def _settled(pending: "Pending", receive: Receive) -> bool:
    """Waits for what is pending, and cancels it if the client leaves: then False."""
    leaving = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait((pending, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not pending.done():
            pending.cancel()
    return not pending.cancelled()


async def _until_disconnected(receive: Receive) -> None:
    """After the body nothing else can come; a server may repeat an empty end of it."""
    for _ in range(2):
        if (await receive())["type"] == "http.disconnect":
            return
    await asyncio.get_running_loop().create_future()


async def _send(outcome: Outcome, send: Send, budget: ByteBudget) -> None:
    status, headers, content, more = outcome
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": bool(more)})
    if more:
        await _send_more(more, send, budget)


async def _send_more(parts: Sequence[bytes], send: Send, budget: ByteBudget) -> None:
    """Parts that wait for the client count as unread."""
    waiting = sum(map(len, parts))
    budget.taken += waiting
    try:
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            budget.taken -= len(part)
            waiting -= len(part)
    finally:
        budget.taken -= waiting
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_early(outcome: Outcome, receive: Receive, send: Send) -> None:
    """Answers although the body is still arriving, and has the connection closed.

    Closing with bytes unread makes TCP reset the connection, which can cost the client the answer
    it has not read yet. So the rest of the body is thrown away for a moment first.
    """
    status, headers, content, _ = outcome
    headers = [*headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
