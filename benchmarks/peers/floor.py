"""The floor: a raw ASGI handler that turns bytes into rows, asks the model and writes bytes.

It checks nothing and joins nothing; what a server costs more than this is what it does besides.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.peers import answers

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

answer = answers.load()


async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    del scope
    body = await read(receive)
    await respond(send, answers.joined(answer(answers.rows(body))))


async def read(receive: Receive) -> bytes:
    message = await receive()
    body: bytes = message["body"]
    while message["more_body"]:
        message = await receive()
        body += message["body"]
    return body


async def respond(send: Send, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
