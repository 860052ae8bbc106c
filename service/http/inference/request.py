"""One inference request, from its head to its answer: the same steps whichever way it came.

`asgi.py` brings requests as ASGI does; `connection/fast_answers.py` brings those whose head is
known already. Nothing is awaited here.
"""

import asyncio
import logging
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

from service.errors import DSSError
from service.http import problems
from service.http.inference.handler import (
    LARGE_ANSWER,
    Asked,
    Header,
    InferenceHandler,
    RequestHead,
    Target,
)
from service.http.inference.routes import Place
from service.http.observer import ID_HEADER, NO_TRACE_HEADERS, ObservedRequest, TraceHeaders
from service.topk import RUNGS, SPARSE, Answered, DeadlineExceeded, Mode, TopK

logger = logging.getLogger(__name__)

ESCALATED = RUNGS.index("escalated")


class Outcome(NamedTuple):
    """What is sent to the client."""

    status: int
    headers: list[Header]
    content: bytes
    more: Sequence[bytes] = ()  # of the content


Pending = asyncio.Future[Any]  # of an Answered, or of an Outcome


class InferenceRequest(ObservedRequest):
    # Here rather than set one by one: most requests are over in microseconds.
    _target: Target | None = None
    _asked: Asked | None = None
    _answer: Answered | None = None
    _reason: str | None = None  # of a failure
    _bytes_in = _bytes_out = 0
    _decoded = _computed = 0.0

    def __init__(
        self,
        handler: InferenceHandler[Any],
        place: Place,
        path: str,
        trace: TraceHeaders = NO_TRACE_HEADERS,
    ) -> None:
        state = handler.state
        super().__init__(state.metrics, state.recorder, trace)
        self._state = state
        self._handler = handler
        self._place = place
        self._path = path

    def find_model(self) -> Target:
        self._target = target = self._handler.target(self._place)
        return target

    def admit(self) -> Target:
        """Refuses at once what there is no room for: its body is not even looked at."""
        self._state.budget.check()
        target = self.find_model()
        target.model.batcher.admit()
        return target

    def respond(self, head: RequestHead, body: bytes) -> "Outcome | Pending":
        """Admits, decodes and asks. What is not over in this turn goes to `complete`."""
        try:
            target = self.admit()
            self._bytes_in = len(body)
            plain = self._handler.body_at_once(head.head, body)
            if plain is None:
                return self._respond_to_large(head, body, target)
            asked = self._handler.read_body(head.head, plain, target.bounds)
            answer = self._ask(head, asked, target)
            return answer if isinstance(answer, asyncio.Future) else self._encode(head, answer)
        except Exception as error:
            return self.fail(error)

    def complete(self, head: RequestHead, settled: "Pending") -> "Outcome | Pending":
        """The next step, when what was pending is there or has failed."""
        try:
            result = settled.result()
            return result if isinstance(result, Outcome) else self._encode(head, result)
        except Exception as error:
            return self.fail(error)

    def _ask(
        self, head: RequestHead, asked: Asked, target: Target
    ) -> "Answered | asyncio.Future[Answered]":
        self._asked = asked
        self._asked = asked = self._handler.settle_mode(asked, target)
        seconds = head.seconds if asked.seconds is None else min(head.seconds, asked.seconds)
        deadline = self.arrived + seconds
        self._decoded = perf_counter()
        if self._decoded > deadline:
            raise DeadlineExceeded(f"The answer could not be given in {seconds:g} seconds.")
        return self._handler.ask(head.head, target, asked, deadline)

    # --- what takes longer than a turn of the event loop may ----------------------------------

    def _respond_to_large(self, head: RequestHead, body: bytes, target: Target) -> "Pending":
        """Refuses what there is no room for, before any of it is decompressed or decoded."""
        size = self._handler.large_body_bytes(head.head, body)
        self._state.pieces.admit(size)
        self._state.budget.take_large(size)
        pieces = self._handler.body_in_pieces(head.head, body, size, target.bounds)
        asked = self._state.pieces.run(pieces, size, self.arrived + head.seconds)
        asked.add_done_callback(lambda _: self._state.budget.give_back(size))
        pending = asyncio.ensure_future(self._respond_after(head, asked))
        pending.add_done_callback(lambda _: asked.cancel())  # if the client has left
        return pending

    async def _respond_after(
        self, head: RequestHead, decoding: "asyncio.Future[Asked]"
    ) -> "Answered | Outcome":
        asked = await decoding
        # The model may have been replaced in the meantime.
        answer = self._ask(head, asked, self.find_model())
        return await answer if isinstance(answer, asyncio.Future) else answer

    async def _encode_large(self, head: RequestHead, answer: Answered) -> Outcome:
        assert self._target is not None and self._asked is not None  # noqa: S101
        size = answer.classes.size * self._target.json_bytes
        self._state.budget.take_large(size)
        try:
            pieces = self._handler.encode_large(head.head, self._asked, self._target, answer)
            encoded = self._state.pieces.run(pieces, size, self.arrived + head.seconds)
            headers, (first, *more) = await encoded
            return self._succeed(answer, headers, first, more)
        finally:
            self._state.budget.give_back(size)

    def _encode(self, head: RequestHead, answer: Answered) -> "Outcome | Pending":
        assert self._target is not None and self._asked is not None  # noqa: S101
        self._computed = perf_counter()
        if answer.classes.size * self._target.json_bytes > LARGE_ANSWER:
            return asyncio.ensure_future(self._encode_large(head, answer))
        self._state.budget.check()  # other answers may have been written since it was admitted
        headers, content = self._handler.encode(head.head, self._asked, self._target, answer)
        return self._succeed(answer, headers, content)

    def _succeed(
        self, answer: Answered, headers: list[Header], content: bytes, more: Sequence[bytes] = ()
    ) -> Outcome:
        headers.append((ID_HEADER, self.request_id))
        self._answer, self._bytes_out = answer, len(content) + sum(map(len, more))
        finished = self.count(self._place.route.template, "POST", 200)
        self.record(200, finished)
        return Outcome(200, headers, content, more)

    def fail(self, error: Exception) -> Outcome:
        """What is sent to a client whose request failed."""
        model = None if self._target is None else self._target.model
        named = isinstance(error, DSSError)
        self._reason = problems.reason(error) if named else "unknown_failure"
        if named:
            self.metrics.rejected("" if model is None else model.name, self._reason)
        try:
            response = problems.of_failure(error, self._path)
        except Exception:  # not one that clients may see
            extra = {"request_id": self.request_id.decode()}
            logger.error("POST %s failed.", self._place.route.template, exc_info=error, extra=extra)
            response = problems.of_unknown_failure(self._path)
        headers = [*response.raw_headers, (ID_HEADER, self.request_id)]
        content = bytes(response.body)
        self._bytes_out = len(content)
        finished = self.count(self._place.route.template, "POST", response.status_code)
        if model is not None:
            model.metrics.failed(finished - self.arrived)
        self.record(response.status_code, finished)
        return Outcome(response.status_code, headers, content)

    def details(self) -> dict[str, Any]:
        details: dict[str, Any] = {
            "route": self._place.route.template,
            "method": "POST",
            "reason": self._reason,
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
            "decoded": self._decoded,
            "path": self._path,
        }
        if self._target is not None:
            model = self._target.model
            details |= {"model": model.name, "version": model.version}
        if self._asked is not None:
            asked = self._asked
            details |= {"rows": len(asked.hidden), "k": asked.k or 0, "searched": asked.experts}
            details["mode"] = _mode_name(asked.mode)
        if self._answer is not None:
            details |= self._call(self._answer)
        return details

    def _call(self, answer: Answered) -> dict[str, Any]:
        """Of the engine call: when it was, and what it found."""
        if isinstance(answer, TopK):  # it was this request's alone, and made at once
            started, computed, gate_seconds = self._decoded, self._computed, answer.gate_seconds
            expert_seconds = answer.expert_seconds
        else:
            started, computed, gate_seconds, expert_seconds = answer.call
        return {
            "k": answer.classes.shape[1],
            "experts": answer.experts,
            "started": started,
            "computed": computed,
            "gate_seconds": gate_seconds,
            "expert_seconds": float(expert_seconds.sum()),
            "escalated": 0 if answer.rungs is None else int((answer.rungs == ESCALATED).sum()),
        }


def _mode_name(mode: Mode | None) -> str:
    """As logs and traces show it: exact, recall=0.99, rescore, or nothing."""
    if mode is None or mode is SPARSE:
        return ""
    if mode.recall is not None:
        return f"recall={mode.recall:g}"
    return "exact" if mode.exact else "rescore"
