"""One inference request, from its head to its answer: the same steps whichever way it came.

`asgi.py` brings requests as ASGI does; `connection/fast_answers.py` brings those whose head is
known already. Nothing is awaited here.
"""

import asyncio
import logging
from time import perf_counter
from typing import Any, NamedTuple

from service.errors import DSSError
from service.http import problems
from service.http.inference.handler import Asked, Header, InferenceHandler, RequestHead, Target
from service.http.inference.routes import Place
from service.http.observer import ID_HEADER, NO_TRACE_HEADERS, ObservedRequest, TraceHeaders
from service.topk import Answered, DeadlineExceeded, TopK

logger = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What is sent to the client."""

    status: int
    headers: list[Header]
    content: bytes


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

    def respond(self, head: RequestHead, body: bytes) -> "Outcome | asyncio.Future[Answered]":
        """Admits, decodes and asks. An answer that waits for the engine goes to `complete`."""
        try:
            target = self.admit()
            self._bytes_in = len(body)
            self._asked = asked = self._handler.read_body(head.head, body)
            seconds = head.seconds if asked.seconds is None else min(head.seconds, asked.seconds)
            deadline = self.arrived + seconds
            self._decoded = perf_counter()
            if self._decoded > deadline:
                raise DeadlineExceeded(f"The answer could not be given in {seconds:g} seconds.")
            answer = self._handler.ask(target, asked, deadline)
            if isinstance(answer, asyncio.Future):
                return answer
            return self._encode(head, answer)
        except Exception as error:
            return self.fail(error)

    def complete(self, head: RequestHead, answer: "asyncio.Future[Answered]") -> Outcome:
        """What is sent when the engine has answered, or has failed."""
        try:
            return self._encode(head, answer.result())
        except Exception as error:
            return self.fail(error)

    def _encode(self, head: RequestHead, answer: Answered) -> Outcome:
        assert self._target is not None and self._asked is not None  # noqa: S101
        self._computed = perf_counter()
        self._state.budget.check()  # other answers may have been written since it was admitted
        headers, content = self._handler.encode(head.head, self._asked, self._target, answer)
        headers.append((ID_HEADER, self.request_id))
        self._answer, self._bytes_out = answer, len(content)
        finished = self.count(self._place.route.template, "POST", 200)
        self.record(200, finished)
        return Outcome(200, headers, content)

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
        }
