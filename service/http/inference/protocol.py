"""Answers a request whose head is known byte for byte, without parsing it or starting a task.

A client sends the same head again and again; only the body differs. uvicorn parses the first one
and the application answers it. What it came to is kept, and if a request with that head arrives on
an idle connection, it is answered right there: the batcher is asked, and one write is made.
Everything else goes uvicorn's way: other paths, large or slow bodies, pipelining, and a client that
does not read.

Here too, because nobody else sees a connection whole: how many there may be, how large a head may
be, and how long a client may take over its head, its body, and reading its answer.
"""

import asyncio
import logging
from time import perf_counter
from typing import Any, ClassVar

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.http import problems
from service.http.body import ByteBudget
from service.http.inference.connection_limits import Drain, Sweeper
from service.http.inference.handler import Header, InferenceHandler
from service.http.inference.head_cache import HeadCache, Known
from service.http.inference.request import LEARNED, PENDING, InferenceRequest, TraceHeaders
from service.settings import Limits
from service.topk import Answered

logger = logging.getLogger(__name__)

LARGEST_PIECE = 65_536  # of a request that is kept here until the rest has come ...
PIECE_SECONDS = 1.0  # ... and how long
LATE_SECONDS = 5.0  # how much longer than the application's own patience a body may take
LONGEST_COPY = 65_536  # of an answer that is put behind its head before it is written
END = b"\r\n\r\n"
BAD = 400, "The request is not valid HTTP."
TOO_LARGE = 431, "The request's head is too large or has too many headers."
TOO_SLOW = 408, "The request's head took too long to arrive."
TOO_MANY = 503, "The server has as many connections as it may; try again soon."


class InferenceProtocol(HttpToolsProtocol):
    heads: ClassVar[HeadCache]
    limits: ClassVar[Limits]
    budget: ClassVar[ByteBudget]
    sweeper: ClassVar[Sweeper]

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._begun = 0  # requests that uvicorn's parser found in what it was given last
        self._mid_message = False  # it has not found the end of the last one
        self._mid_head = False  # ... nor even that of its head
        self._head_bytes = 0  # of it
        self._refusal = BAD  # what to say if the parser gives up
        self._new_head = b""  # of the request that the application answers
        self._piece = b""  # the beginning of a request with a known head
        self._patience: asyncio.TimerHandle | None = None  # with the piece
        self._pending: asyncio.Future[Answered] | None = None
        self._held = b""  # what came while an answer was pending
        self._ends = False  # after the pending answer
        self._active = self.loop.time()  # when a request last began or was answered
        self._unread = 0  # bytes of answers that the budget counts
        self._drain: Drain | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.sweeper.watch(self.loop, self.connections)  # type: ignore[arg-type]
        if len(self.connections) > self.limits.max_connections:
            self._refuse(*TOO_MANY)

    # --- reading -----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._pending is not None:
            self._held += data
            self.flow.pause_reading()
            return
        piece = self._take_piece()
        data = piece + data if piece else data
        cycle = self.cycle
        idle = not self._mid_message and (cycle is None or cycle.response_complete)
        if not idle or self.pipeline or self.flow.write_paused:
            self._feed(data)
            return
        end = data.find(END)
        found = self.heads.find(data[:end]) if end > 0 else None
        if found is None:
            self._begun = 0
            self._new_head = data[:end] if end > 0 else b""
            self._feed(data)
            return
        known, marks = found
        size = end + len(END) + known.length
        if len(data) < size <= LARGEST_PIECE and not piece:
            self._keep_piece(data)  # once: a client that trickles is uvicorn's to bound
        elif len(data) != size:
            self._feed(data)
        else:
            self._answer(known, marks, data, end)

    def _feed(self, data: bytes) -> None:
        """Let uvicorn parse it."""
        if self.transport.is_closing():
            return
        self._head_bytes += len(data) if self._mid_head else 0
        super().data_received(data)
        if self._mid_head and self._head_bytes > self.limits.max_head_bytes:
            self._refuse(*TOO_LARGE)

    def _keep_piece(self, data: bytes) -> None:
        self._piece = data
        self._patience = self.loop.call_later(PIECE_SECONDS, self._give_piece)

    def _take_piece(self) -> bytes:
        piece, self._piece = self._piece, b""
        if piece and self._patience is not None:
            self._patience.cancel()
        return piece

    def _give_piece(self) -> None:
        """Let uvicorn wait for the rest."""
        piece = self._take_piece()
        if piece and not self.transport.is_closing():
            self._feed(piece)

    # --- what uvicorn's parser finds ---------------------------------------------------------

    def on_message_begin(self) -> None:
        self._begun += 1
        self._mid_message = self._mid_head = True
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
        self._mid_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._mid_message = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        cycle = self.cycle
        learned: Any = cycle.scope.get(LEARNED) if cycle is not None else None
        if learned is not None and self._new_head and self._begun == 1 and cycle.keep_alive:
            self.heads.learn(self._new_head, cycle.scope, *learned)
        self._new_head = b""
        self._active = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        del msg
        self._refuse(*self._refusal)

    # --- answering ---------------------------------------------------------------------------

    def _answer(self, known: Known, marks: TraceHeaders, data: bytes, end: int) -> None:
        exchange = InferenceRequest(known.path, known.place, known.url, perf_counter(), marks)
        try:
            target = exchange.admit()
            found = exchange.ask(target, known.lead, data[end + len(END) :])
            if isinstance(found, asyncio.Future):
                self._await(found, known, exchange)
                return
            headers, content = exchange.answer(known.lead, found)
        except Exception as error:
            self._fail(exchange.failure(error))
            return
        self._write(200, headers, content)

    def _await(
        self, pending: "asyncio.Future[Answered]", known: Known, exchange: InferenceRequest
    ) -> None:
        def settled(future: "asyncio.Future[Answered]") -> None:
            self._pending = None
            if self.transport.is_closing() or future.cancelled():
                return
            try:
                headers, content = exchange.answer(known.lead, future.result())
            except Exception as error:
                self._fail(exchange.failure(error))
            else:
                self._write(200, headers, content)
            if self._ends:
                self.shutdown()
            elif self._held:
                held, self._held = self._held, b""
                self.flow.resume_reading()
                self.data_received(held)

        self._pending = pending
        pending.add_done_callback(settled)

    def _fail(self, answer: Response) -> None:
        self._write(answer.status_code, answer.raw_headers, bytes(answer.body))

    def _write(self, status: int, headers: list[Header], content: bytes) -> None:
        lines = [STATUS_LINE[status]]
        lines += [b"%b: %b\r\n" % header for header in headers]
        lines += [b"%b: %b\r\n" % header for header in self.server_state.default_headers]
        if self._ends:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        if len(content) <= LONGEST_COPY:
            lines.append(content)
        self.transport.write(b"".join(lines))
        if len(content) > LONGEST_COPY:
            self.transport.write(content)
        self.server_state.total_requests += 1
        self._active = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _refuse(self, status: int, detail: str) -> None:
        """Answer what is no request, and end."""
        answer = problems.problem(status, detail, {"path": ""})
        self._ends = True
        self._fail(answer)
        self.transport.close()

    # --- the client's time -------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Called once a second: whether the client keeps everyone waiting."""
        limits = self.limits
        if self._drain is not None:
            size = self.transport.get_write_buffer_size()
            if self._drain.is_slow(now, size, limits.read_seconds):
                self.transport.abort()
        elif self._pending is not None or self.flow.read_paused:
            pass  # the client is the one who waits
        elif self._mid_head:
            if now - self._active > limits.head_seconds:
                self._refuse(*TOO_SLOW)
        elif self._mid_message:
            if now - self._active > limits.head_seconds + limits.body_seconds + LATE_SECONDS:
                self.transport.abort()
        elif self.cycle is None and now - self._active > self.timeout_keep_alive:
            self.transport.close()  # it never asked anything

    def pause_writing(self) -> None:
        super().pause_writing()
        size = self.transport.get_write_buffer_size()
        self._drain = Drain(self.loop.time(), size)
        self._unread += size
        self.budget.taken += size

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unread()

    def _forget_unread(self) -> None:
        self._drain = None
        self.budget.taken -= self._unread
        self._unread = 0

    # --- ending ------------------------------------------------------------------------------

    def timeout_keep_alive_handler(self) -> None:
        # Setting a timer anew for each answer would cost more than asking late.
        idle = self.loop.time() - self._active
        if self._pending is None and not self._piece and idle >= self.timeout_keep_alive:
            super().timeout_keep_alive_handler()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(
                max(self.timeout_keep_alive - idle, 1.0), self.timeout_keep_alive_handler
            )

    def shutdown(self) -> None:
        if self._pending is None:
            self._give_piece()
            super().shutdown()
        else:
            self._ends = True

    def connection_lost(self, exc: Exception | None) -> None:
        # The client is gone: what waits is not worth computing.
        pending: Any = self._pending
        if pending is None and self.cycle is not None:
            pending = self.cycle.scope.get(PENDING)
        if pending is not None:
            pending.cancel()
        self._take_piece()
        self._forget_unread()
        super().connection_lost(exc)


def protocol(topk: InferenceHandler[Any], infer: InferenceHandler[Any]) -> type[InferenceProtocol]:
    """The protocol of a server with these paths, for uvicorn's `http`."""
    state = topk.state
    its = {
        "heads": HeadCache(topk, infer),
        "limits": state.settings.limits,
        "budget": state.budget,
        "sweeper": Sweeper(),
    }
    return type("InferenceProtocol", (InferenceProtocol,), its)
