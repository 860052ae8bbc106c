"""Limits of a connection: how many there may be, how large a request head may be, and how long a
client may take over its head, its body, and reading its answer.

All connections are checked once a second, which costs less than a timer for each of their steps.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.http import problems
from service.http.body import ByteBudget
from service.http.inference.handler import Header
from service.settings import Limits

CHECK_SECONDS = 1.0
LATE_SECONDS = 5.0  # how much longer than `body_seconds`, which the application checks itself
LONGEST_COPY = 65_536  # of an answer that is put behind its head before it is written
BAD = 400, "The request is not valid HTTP."
TOO_LARGE = 431, "The request's head is too large or has too many headers."
TOO_SLOW = 408, "The request's head took too long to arrive."
TOO_MANY = 503, "The server has as many connections as it may; try again soon."


class Timed(Protocol):
    def check_time(self, now: float) -> None:
        """Ends the connection if its client takes too long; `now` is the event loop's time."""


class Sweeper:
    """Checks all connections once a second, as long as there are any."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, loop: asyncio.AbstractEventLoop, connections: Iterable[Timed]) -> None:
        if self._timer is None:
            self._timer = loop.call_later(CHECK_SECONDS, self._sweep, loop, connections)

    def _sweep(self, loop: asyncio.AbstractEventLoop, connections: Iterable[Timed]) -> None:
        self._timer = None
        now = loop.time()
        for connection in list(connections):
            connection.check_time(now)
        if connections:
            self.watch(loop, connections)


class UnreadAnswer:
    """An answer that its client has not read yet: some of it must leave again and again."""

    ENOUGH = 65_536  # bytes

    def __init__(self, now: float, size: int) -> None:
        self._since = now
        self._left = size

    def is_slow(self, now: float, size: int, seconds: float) -> bool:
        if size <= self._left - self.ENOUGH:
            self._since, self._left = now, size
        return now - self._since > seconds


class LimitedConnection(HttpToolsProtocol):
    """uvicorn's protocol, held to the limits. The application answers every request."""

    limits: ClassVar[Limits]
    budget: ClassVar[ByteBudget]
    sweeper: ClassVar[Sweeper]

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._in_message = False  # the parser has not found the end of a request
        self._in_head = False  # ... nor even that of its head
        self._head_bytes = 0  # of it
        self._refusal = BAD  # what to say if the parser gives up
        self._closes = False  # after the next answer
        self._active = self.loop.time()  # when a request last began or was answered
        self._unread = 0  # bytes of answers that the budget counts
        self._unread_answer: UnreadAnswer | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.sweeper.watch(self.loop, self.connections)  # type: ignore[arg-type]
        if len(self.connections) > self.limits.max_connections:
            self._refuse(*TOO_MANY)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._head_bytes += len(data) if self._in_head else 0
        super().data_received(data)
        if self._in_head and self._head_bytes > self.limits.max_head_bytes:
            self._refuse(*TOO_LARGE)

    # --- what uvicorn's parser finds ---------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_message = self._in_head = True
        self._head_bytes = 0
        self._active = self.loop.time()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        limits = self.limits
        if len(self.headers) >= limits.max_headers or self._head_bytes > limits.max_head_bytes:
            self._refusal = TOO_LARGE
            raise ValueError  # the parser gives up, and uvicorn calls send_400_response
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._active = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        del msg
        self._refuse(*self._refusal)

    # --- refusing ----------------------------------------------------------------------------

    def _refuse(self, status: int, detail: str) -> None:
        """Answers what is no request, and closes the connection."""
        response: Response = problems.problem(status, detail, "")
        self._closes = True
        self._write(status, response.raw_headers, bytes(response.body))
        self.transport.close()

    def _write(self, status: int, headers: list[Header], content: bytes) -> None:
        lines = [STATUS_LINE[status]]
        lines += [b"%b: %b\r\n" % header for header in headers]
        lines += [b"%b: %b\r\n" % header for header in self.server_state.default_headers]
        if self._closes:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        if len(content) <= LONGEST_COPY:
            lines.append(content)
        self.transport.write(b"".join(lines))
        if len(content) > LONGEST_COPY:
            self.transport.write(content)

    # --- the client's time -------------------------------------------------------------------

    def check_time(self, now: float) -> None:
        limits = self.limits
        if self._unread_answer is not None:
            size = self.transport.get_write_buffer_size()
            if self._unread_answer.is_slow(now, size, limits.read_seconds):
                self.transport.abort()
        elif self._client_waits():
            pass
        elif self._in_head:
            if now - self._active > limits.head_seconds:
                self._refuse(*TOO_SLOW)
        elif self._in_message:
            if now - self._active > limits.head_seconds + limits.body_seconds + LATE_SECONDS:
                self.transport.abort()
        elif self.cycle is None and now - self._active > self.timeout_keep_alive:
            self.transport.close()  # it never asked anything

    def _client_waits(self) -> bool:
        """Whether the server has not read, or not answered, what the client has sent."""
        return self.flow.read_paused

    def pause_writing(self) -> None:
        super().pause_writing()
        size = self.transport.get_write_buffer_size()
        self._unread_answer = UnreadAnswer(self.loop.time(), size)
        self._unread += size
        self.budget.taken += size

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unread()

    def _forget_unread(self) -> None:
        self._unread_answer = None
        self.budget.taken -= self._unread
        self._unread = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_unread()
        super().connection_lost(exc)
