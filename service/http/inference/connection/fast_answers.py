"""Answers a request whose head is known byte for byte, without parsing it or starting a task.

A client sends the same head again and again; only the body differs. uvicorn parses the first one
and the application answers it; what its head asks for is kept. If a request with that head arrives
on an idle connection, it is answered right there: the batcher is asked, and one write is made.
Everything else goes uvicorn's way: other paths, large or slow bodies, pipelining, and a client that
does not read.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.http.inference.connection.head_cache import HeadCache, KnownHead
from service.http.inference.connection.limits import LimitedConnection, Sweeper
from service.http.inference.connection.sequential import END
from service.http.inference.connection.turns import Turns
from service.http.inference.handler import Header, InferenceHandler
from service.http.inference.request import InferenceRequest, Pending
from service.http.inference.routes import Protocol
from service.http.observer import TraceHeaders
from service.http.state import AppState

logger = logging.getLogger(__name__)

# The versions of uvicorn whose inside is known to be as this needs it; pyproject.toml has the same.
OLDEST, NEWEST = (0, 50), (0, 54)
LARGEST_PIECE = 65_536  # of a request that is kept here until the rest has come ...
PIECE_SECONDS = 1.0  # ... and how long


def connection_class(
    state: AppState, handlers: Mapping[Protocol, InferenceHandler[Any]]
) -> type[HttpToolsProtocol]:
    """What uvicorn makes of each connection (its setting `http`)."""
    shared: dict[str, Any] = {
        "state": state,
        "limits": state.settings.limits,
        "budget": state.budget,
        "sweeper": Sweeper(),
        "turns": Turns(),
    }
    if not state.settings.head_cache or not _is_tested(uvicorn.__version__):
        return type("Connection", (LimitedConnection,), shared)
    shared["heads"] = HeadCache(state, handlers)
    return type("Connection", (FastConnection,), shared)


def _is_tested(version: str) -> bool:
    major, minor = (int(part) for part in version.split(".")[:2])
    if OLDEST <= (major, minor) <= NEWEST:
        return True
    logger.warning(
        "The head cache is off: it was tested with uvicorn %s to %s, and this is %s. The server"
        " answers fewer requests a second; install a tested version to turn it on.",
        ".".join(map(str, OLDEST)), ".".join(map(str, NEWEST)), version,
    )  # fmt: skip
    return False


class FastConnection(LimitedConnection):
    heads: ClassVar[HeadCache]

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._begun = 0  # requests that uvicorn's parser found in what it was given last
        self._new_head = b""  # of the request that the parser is given
        self._piece = b""  # the beginning of a request with a known head
        self._piece_timer: asyncio.TimerHandle | None = None
        self._was_piece = False  # the beginning of what is taken up now has waited
        self._pending: Pending | None = None

    # --- reading -----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._piece:
            data = self._take_piece() + data
            self._was_piece = True
        if self._pending is not None or self._waiting:
            super().data_received(data)
            return
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._take(data, 0)
        else:
            super().data_received(data)

    def _take(self, data: bytes, start: int) -> None:
        """Answers a request with a known head; gives any other to the parser."""
        if self._in_message or self.flow.write_paused:
            super()._take(data, start)
            return
        was_piece, self._was_piece = self._was_piece, False
        end = data.find(END, start)
        head = data[start:end] if end > 0 else b""
        found = self.heads.find(head) if head else None
        if found is None:
            self._begun = 0
            self._new_head = head.lstrip(b"\r\n")
            super()._take(data, start)
            return
        known, trace = found
        body = end + len(END)
        rest = body + known.length
        if len(data) >= rest:
            if len(data) > rest:
                self._keep(data, rest)
            self._answer(known, trace, data[body:rest])
        elif rest - start <= LARGEST_PIECE and not was_piece:
            self._keep_piece(data[start:])  # once: a client that trickles is uvicorn's to bound
        else:
            super()._take(data, start)

    def _keep_piece(self, data: bytes) -> None:
        self._piece = data
        self._piece_timer = self.loop.call_later(PIECE_SECONDS, self._give_piece)

    def _take_piece(self) -> bytes:
        piece, self._piece = self._piece, b""
        if piece and self._piece_timer is not None:
            self._piece_timer.cancel()
        return piece

    def _give_piece(self) -> None:
        """Lets uvicorn wait for the rest."""
        piece = self._take_piece()
        if piece:
            super()._take(piece, 0)

    # --- what uvicorn's parser finds ---------------------------------------------------------

    def on_message_begin(self) -> None:
        self._begun += 1
        super().on_message_begin()

    def on_response_complete(self) -> None:
        head, self._new_head = self._new_head, b""
        cycle = self.cycle
        if head and self._begun == 1 and cycle is not None and cycle.keep_alive:
            scope = cycle.scope
            if scope["method"] == "POST" and scope["http_version"] == "1.1":
                path, headers = scope["path"], list(scope["headers"])
                self.heads.learn(head, path, headers, scope["query_string"])
        super().on_response_complete()

    # --- answering ---------------------------------------------------------------------------

    def _answer(self, known: KnownHead, trace: TraceHeaders, body: bytes) -> None:
        request = InferenceRequest(known.handler, known.place, known.path, trace)
        outcome = request.respond(known.head, body)
        if isinstance(outcome, asyncio.Future):
            self._await(outcome, known, request)
        else:
            self._finish(*outcome)

    def _await(self, pending: Pending, known: KnownHead, request: InferenceRequest) -> None:
        def settled(pending: Pending) -> None:
            self._pending = None
            if self.transport.is_closing() or pending.cancelled():
                return
            step = request.complete(known.head, pending)
            if isinstance(step, asyncio.Future):
                self._await(step, known, request)
            else:
                self._finish(*step)

        self._pending = pending
        pending.add_done_callback(settled)

    def _finish(
        self, status: int, headers: list[Header], content: bytes, more: Sequence[bytes]
    ) -> None:
        closes = (self._closes or self.state.draining) and not self._waiting
        self._write(status, headers, content, closes=closes)
        for part in more:
            self.transport.write(part)
        self.server_state.total_requests += 1
        self._active = self.loop.time()
        if closes:
            self.transport.close()
        elif self._waiting:
            self._go_on()
        elif self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _is_answering(self) -> bool:
        return self._pending is not None or super()._is_answering()

    def _client_waits(self) -> bool:
        return self._pending is not None or super()._client_waits()

    # --- ending ------------------------------------------------------------------------------

    def timeout_keep_alive_handler(self) -> None:
        # Setting a timer anew for each answer would cost more than looking late.
        idle = self.loop.time() - self._active
        if self._pending is None and not self._piece and idle >= self.timeout_keep_alive:
            super().timeout_keep_alive_handler()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(
                max(self.timeout_keep_alive - idle, 1.0), self.timeout_keep_alive_handler
            )

    def shutdown(self) -> None:
        self._give_piece()
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._pending is not None:  # the client is gone: what waits is not worth computing
            self._pending.cancel()
        self._take_piece()
        super().connection_lost(exc)
