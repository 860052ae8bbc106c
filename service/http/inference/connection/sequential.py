"""Gives uvicorn's parser one request of a connection at a time, and ends connections in order.

uvicorn parses all that has arrived and starts or queues every request in it, so that a packet of
tiny ones costs any amount of work and memory. Here the parser is given the bytes of one request;
the rest waits, unparsed, until that is answered and the connection has its turn (`turns.py`).
Meanwhile nothing more is read.
"""

import asyncio
import select
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.http.body import ByteBudget
from service.http.inference.connection.paced_transport import PacedTransport
from service.http.inference.connection.turns import Turns
from service.http.state import AppState

END = b"\r\n\r\n"  # of a request head, and of a body in chunks
# The parser is given so much at once, and so often in one turn, of a head or of a body in chunks:
# any number of headers or chunks may be in it. A body of known length is one piece.
PIECE_BYTES = 4096
PIECES_A_TURN = 2
# A client that has ended its side of the connection has left, or waits for its answer. It is
# answered if that takes no longer than this.
HALF_CLOSED_SECONDS = 2.0
# Before the server ends, a connection is closed once nothing has come for so long: a client that
# is about to send its next request is answered instead.
QUIET_SECONDS = 1.0
QUIET_CHECK_SECONDS = 0.05


class SequentialConnection(HttpToolsProtocol):
    state: ClassVar[AppState]
    budget: ClassVar[ByteBudget]
    turns: ClassVar[Turns]
    transport: PacedTransport

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._in_message = False  # the parser has not found the end of a request
        self._in_head = False  # ... nor even that of its head
        self._body_left = 0  # of a body whose length is known
        self._upgrade = False  # the parser takes what follows for another protocol
        self._waiting = b""  # what the parser was not given yet, from here on:
        self._waiting_from = 0
        self._closes = False  # after the last answer
        self._active = self.loop.time()  # when a request last began or was answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(PacedTransport(transport, self.budget, self._on_blocked))

    def _on_blocked(self, blocked: bool) -> None:
        """An answer waits for the client to read it, or no longer does."""
        if blocked:
            self.flow.pause_writing()
        else:
            self.flow.resume_writing()

    def pause_writing(self) -> None:
        self.transport.transport_full()

    def resume_writing(self) -> None:
        self.transport.transport_ready()

    # --- one request after the other ---------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._waiting:  # the transport had read it already
            self._keep(self._waiting[self._waiting_from :] + data, 0)
        elif self._is_answering():
            self._keep(data, 0)
        else:
            self._take(data, 0)

    def _is_answering(self) -> bool:
        """Whether the next request must wait."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        return not self._in_message or bool(self.pipeline)

    def _keep(self, data: bytes, start: int) -> None:
        """Has what comes after `start` wait."""
        self.budget.taken += len(data) - len(self._waiting)
        self._waiting, self._waiting_from = data, start
        self.transport.pause_reading("waiting")

    def take_turn(self) -> None:
        """Goes on with what waits."""
        if not self._waiting or self._is_answering() or self.transport.is_closing():
            return  # an answer asks for the next turn
        data, start = self._waiting, self._waiting_from
        self._drop_waiting()
        self._take(data, start)
        if not self._waiting:
            self.transport.resume_reading("waiting")

    def _drop_waiting(self) -> None:
        self.budget.taken -= len(self._waiting)
        self._waiting = b""

    def _take(self, data: bytes, start: int) -> None:
        """Has the parser read one request, or what has come of it."""
        size = len(data)
        if not self._in_message:
            while start < size and data[start] in b"\r\n":  # may stand before a request
                start += 1
            if start == size:
                return
        self._unset_keepalive_if_required()
        for _ in range(PIECES_A_TURN):
            start = self._parse(data, start, self._piece_end(data, start))
            if start < 0:
                return
            if start == size or self._is_answering():
                break
        if start < size:
            self._keep(data, start)
        if not self._is_answering():
            self._go_on()
        elif self.state.draining or self._closes:
            self.close_after_answer()

    def _piece_end(self, data: bytes, start: int) -> int:
        """Where the parser must stop, so that it does not find a second request."""
        if self._body_left:
            return min(start + self._body_left, len(data))
        limit = min(start + PIECE_BYTES, len(data))
        found = data.find(END, start, limit)
        return limit if found < 0 else found + len(END)

    def _parse(self, data: bytes, start: int, end: int) -> int:
        """How far the parser has come; -1 if this is no request."""
        try:
            self.parser.feed_data(memoryview(data)[start:end])
        except httptools.HttpParserUpgrade as found:
            end = start + found.args[0]
            head = self._head_without_upgrade()
            return end if self._parse(head, 0, len(head)) >= 0 else -1
        except httptools.HttpParserError:
            self.send_400_response("")
            return -1
        return end

    def _go_on(self) -> None:
        """What waits has its turn next."""
        if self._waiting:
            self._unset_keepalive_if_required()
            self.turns.wait(self)
        elif self._closes:
            self._close_when_quiet()

    # --- what uvicorn's parser finds ---------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_message = self._in_head = True
        self._upgrade = False
        self._active = self.loop.time()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # what comes after a body in chunks is no header
            super().on_header(name, value.rstrip(b" \t"))  # the parser cuts off only what leads

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError  # the parser gives up: this server is no proxy
            self._upgrade = True
            return
        lengths = [value for name, value in self.headers if name == b"content-length"]
        self._body_left = int(lengths[0]) if lengths else 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._body_left:
            self._body_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        if not self._upgrade:
            super().on_message_complete()

    def _head_without_upgrade(self) -> bytes:
        """The request head that asks for no other protocol: this server has none, and goes on.

        The parser has read all of it and reads the result again, so nothing gets into it that was
        not a header before.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (method, self.url, version)]
        lines += [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"".join([*lines, b"\r\n"])

    def on_response_complete(self) -> None:
        self._active = self.loop.time()
        super().on_response_complete()
        if not self.transport.is_closing():
            self._go_on()

    # --- ending ------------------------------------------------------------------------------

    def close_after_answer(self) -> None:
        """Says so in the last answer to what has come."""
        self._closes = True
        if self.cycle is not None and not self._in_message and not self._waiting:
            self.cycle.keep_alive = False

    def eof_received(self) -> bool | None:  # type: ignore[override]
        if self.scheme == "https" or not (self._is_answering() or self._waiting):
            return None  # TLS knows no half of a connection
        self.loop.call_later(HALF_CLOSED_SECONDS, self._close_unanswered)
        self.close_after_answer()
        return True

    def _close_unanswered(self) -> None:
        if self._is_answering():
            self.transport.close()

    def shutdown(self) -> None:
        """uvicorn: the server ends."""
        self.close_after_answer()
        self._close_when_quiet()

    def _close_when_quiet(self) -> None:
        if self.transport.is_closing() or self._is_busy():
            return
        quiet = self.loop.time() - self._active
        if quiet < QUIET_SECONDS or self._has_arrived():
            wait = max(QUIET_SECONDS - quiet, QUIET_CHECK_SECONDS)
            self.loop.call_later(wait, self._close_when_quiet)
        else:
            self.transport.close()

    def _is_busy(self) -> bool:
        """Whether something has come that is unanswered."""
        return self._in_message or bool(self._waiting) or self._is_answering()

    def _has_arrived(self) -> bool:
        """Whether the kernel has something that was not read yet."""
        kernel = select.poll()
        kernel.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(kernel.poll(0))

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_waiting()
        self.transport.forget()
        super().connection_lost(exc)
