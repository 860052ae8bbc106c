"""Answers a request whose head is known byte for byte, without parsing it or starting a task.

A client sends the same head again and again; only the body differs. uvicorn parses the first one
and the application answers it. What it came to is kept, and if a request with that head arrives on
an idle connection, it is answered right there: the batcher is asked, and one write is made.
Everything else goes uvicorn's way: other paths, large or slow bodies, pipelining, a client that
does not read, and every request that fails, so that there is one place that says why.
"""

import asyncio
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service import hot
from service.batcher import Answered
from service.hot import Asked, HotPath, Place, Target

HEADS_KEPT = 256
LONGEST_HEAD = 2048
LARGEST_PIECE = 65_536  # of a request that is kept here until the rest has come ...
PIECE_SECONDS = 1.0  # ... and how long
END = b"\r\n\r\n"
# A request with one of these asks for more than an answer.
UNUSUAL = {b"expect", b"transfer-encoding", b"upgrade"}


class Known(NamedTuple):
    """What a head asks for."""

    path: HotPath[Any]
    place: Place
    head: Any
    length: int  # of the body


class Heads:
    """The heads that all connections know."""

    def __init__(self, topk: HotPath[Any], infer: HotPath[Any], max_body_bytes: int) -> None:
        self._topk = topk
        self._infer = infer
        self._max_body_bytes = max_body_bytes
        self._known: dict[bytes, Known] = {}
        self.get = self._known.get

    def learn(self, head: bytes, scope: Any) -> None:  # noqa: ANN401
        """Keep what uvicorn has made of a head, if it is a usual request for top-k."""
        if scope["method"] != "POST" or scope["http_version"] != "1.1" or len(head) > LONGEST_HEAD:
            return
        place = hot.place(scope["path"])
        headers = scope["headers"]
        lengths = [value for name, value in headers if name == b"content-length"]
        if place is None or len(lengths) != 1 or UNUSUAL & {name for name, _ in headers}:
            return
        length = int(lengths[0])
        if length > self._max_body_bytes:
            return
        path = self._topk if place.native else self._infer
        try:
            read = path.read_head(headers, scope["query_string"])
        except Exception:
            return  # the application says what is wrong
        if len(self._known) >= HEADS_KEPT:
            self._known.clear()
        self._known[head] = Known(path, place, read, length)


class HotProtocol(HttpToolsProtocol):
    heads: ClassVar[Heads]

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._begun = 0  # requests that uvicorn's parser found in what it was given last
        self._mid_message = False  # it has not found the end of the last one
        self._piece = b""  # the beginning of a request with a known head
        self._patience: asyncio.TimerHandle | None = None  # with the piece
        self._pending: asyncio.Future[Answered] | None = None
        self._held = b""  # what came while an answer was pending
        self._ends = False  # after the pending answer
        self._active = 0.0  # when an answer was last written

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
        if not idle or self.pipeline or self.config.access_log or self.flow.write_paused:
            super().data_received(data)
            return
        end = data.find(END)
        known = self.heads.get(data[:end])
        if known is None:
            self._begun = 0
            super().data_received(data)
            self._learn(data, end)
            return
        size = end + len(END) + known.length
        if len(data) < size <= LARGEST_PIECE and not piece:
            self._keep_piece(data)  # once: a client that trickles is uvicorn's to bound
        elif len(data) != size or not self._answer(known, data, end):
            super().data_received(data)

    def _learn(self, data: bytes, end: int) -> None:
        """Learn the head of `data`, if it is the only one there."""
        cycle = self.cycle
        if end < 0 or self._begun != 1 or cycle is None or cycle.scope is not self.scope:
            return
        if cycle.keep_alive and not self.transport.is_closing():
            self.heads.learn(data[:end], self.scope)

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
            super().data_received(piece)

    def on_message_begin(self) -> None:
        self._begun += 1
        self._mid_message = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._mid_message = False
        super().on_message_complete()

    # --- answering ---------------------------------------------------------------------------

    def _answer(self, known: Known, data: bytes, end: int) -> bool:
        """Whether the request is answered, now or soon; if not, uvicorn must have it."""
        arrived = perf_counter()
        path = known.path
        try:
            target = path.target(known.place)
            asked = path.read_body(known.head, data[end + len(END) :])
            answer = path.ask(target, asked)
            if isinstance(answer, asyncio.Future):
                self._await(answer, known, target, asked, data, arrived)
            else:
                self._write(known, target, asked, answer, arrived)
        except Exception:
            return False
        return True

    def _await(
        self,
        pending: "asyncio.Future[Answered]",
        known: Known,
        target: Target,
        asked: Asked,
        data: bytes,
        arrived: float,
    ) -> None:
        def settled(future: "asyncio.Future[Answered]") -> None:
            self._pending = None
            if self.transport.is_closing() or future.cancelled():
                return
            try:
                self._write(known, target, asked, future.result(), arrived)
            except Exception:
                super(HotProtocol, self).data_received(data)
            if self._ends:
                self.shutdown()
            elif self._held:
                held, self._held = self._held, b""
                self.flow.resume_reading()
                self.data_received(held)

        self._pending = pending
        pending.add_done_callback(settled)

    def _write(
        self, known: Known, target: Target, asked: Asked, answer: Answered, arrived: float
    ) -> None:
        headers, content = known.path.encode(known.head, asked, target, answer)
        lines = [b"HTTP/1.1 200 OK"]
        lines += [b"%b: %b" % header for header in self.server_state.default_headers]
        lines += [b"%b: %b" % header for header in headers]
        if self._ends:
            lines.append(b"connection: close")
        lines += [b"", content]
        # Counted before it leaves, so that a client that has its answer finds it counted.
        target.good.answered(perf_counter() - arrived)
        self.transport.write(b"\r\n".join(lines))
        self.server_state.total_requests += 1
        self._active = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

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
        if self._pending is not None:
            self._pending.cancel()  # the client is gone: what waits is not worth computing
        self._take_piece()
        super().connection_lost(exc)


def protocol(topk: HotPath[Any], infer: HotPath[Any], max_body_bytes: int) -> type[HotProtocol]:
    """The protocol of a server with these paths, for uvicorn's `http`."""
    return type("HotProtocol", (HotProtocol,), {"heads": Heads(topk, infer, max_body_bytes)})
