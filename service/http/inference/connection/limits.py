"""Limits of a connection: how many there may be, how large a request head may be, and how long a
client may take over its head, its body, and reading its answer.

All connections are checked once a second, which costs less than a timer for each of their steps.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from service.http import problems
from service.http.inference.connection.sequential import SequentialConnection
from service.http.inference.handler import Header
from service.settings import Limits

CHECK_SECONDS = 1.0
LATE_SECONDS = 5.0  # how much longer than `body_seconds`, which the application checks itself
LONGEST_COPY = 65_536  # of an answer that is put behind its head before it is written
BAD = 400, "The request is not valid HTTP."
TOO_LARGE = 431, "The request's head is too large or has too many headers."
TOO_SLOW = 408, "The request's head took too long to arrive."
TOO_MANY_BYTES = 503, "The server holds as many bytes as it may; try again soon."
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


class LimitedConnection(SequentialConnection):
    """uvicorn's protocol, held to the limits. The application answers every request."""

    limits: ClassVar[Limits]
    sweeper: ClassVar[Sweeper]

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._head_bytes = 0  # of the request that the parser reads
        self._refusal = BAD  # what to say if the parser gives up
        self._unread_answer: UnreadAnswer | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.sweeper.watch(self.loop, self.connections)  # type: ignore[arg-type]
        if len(self.connections) > self.limits.max_connections:
            self._refuse(*TOO_MANY)

    def _keep(self, data: bytes, start: int) -> None:
        super()._keep(data, start)
        if self.budget.taken > self.budget.most:
            self._drop_waiting()
            if self._in_message:
                self._refuse(*TOO_MANY_BYTES)
            else:
                self.close_after_answer()

    # --- what uvicorn's parser finds ---------------------------------------------------------

    def _parse(self, data: bytes, start: int, end: int) -> int:
        self._head_bytes += end - start if self._in_head else 0
        end = super()._parse(data, start, end)
        if self._in_head and self._head_bytes > self.limits.max_head_bytes and end >= 0:
            self._refuse(*TOO_LARGE)
            return -1
        return end

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        limits = self.limits
        if len(self.headers) >= limits.max_headers or self._head_bytes > limits.max_head_bytes:
            self._refusal = TOO_LARGE
            raise ValueError  # the parser gives up, and send_400_response is called
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        del msg
        self._refuse(*self._refusal)

    # --- refusing ----------------------------------------------------------------------------

    def _refuse(self, status: int, detail: str) -> None:
        """Answers what is no request, and closes the connection."""
        response: Response = problems.problem(status, detail, "")
        self._write(status, response.raw_headers, bytes(response.body), closes=True)
        self.transport.close()

    def _write(
        self, status: int, headers: list[Header], content: bytes, *, closes: bool = False
    ) -> None:
        lines = [STATUS_LINE[status]]
        lines += [b"%b: %b\r\n" % header for header in headers]
        lines += [b"%b: %b\r\n" % header for header in self.server_state.default_headers]
        if closes:
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
        if self._unread_answer is not None or self.transport.is_closing():
            self._check_reading(now)
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

    def _check_reading(self, now: float) -> None:
        """Also of a client whose connection was closed: it may have left the last bytes unread."""
        size = self.transport.get_write_buffer_size()
        if self._unread_answer is None:
            self._unread_answer = UnreadAnswer(now, size)
        if self._unread_answer.is_slow(now, size, self.limits.read_seconds):
            self.transport.abort()

    def _client_waits(self) -> bool:
        """Whether the server has not read, or not answered, what the client has sent."""
        return self.flow.read_paused or bool(self._waiting)

    def _on_blocked(self, blocked: bool) -> None:
        super()._on_blocked(blocked)
        self._unread_answer = None
        if blocked:
            size = self.transport.get_write_buffer_size()
            self._unread_answer = UnreadAnswer(self.loop.time(), size)
