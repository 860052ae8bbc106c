"""One request for top-k from its head to its answer, whichever way it came.

ASGI brings it step by step (`answer`); `protocol.py` takes the same steps for heads that it knows.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.errors import DSSError
from service.http import body as limits
from service.http import problems
from service.http.codecs import InvalidField
from service.http.inference.handler import Asked, Header, InferenceHandler, Place, Target
from service.telemetry import request_ids
from service.telemetry.request_events import RequestEvent
from service.topk import Answered, DeadlineExceeded, QueueFull, TopK

logger = logging.getLogger(__name__)

TIMEOUT = b"dss-timeout"
ID_HEADER = request_ids.HEADER
# What a request's scope tells the connection:
PENDING = "dss.pending"  # what to cancel when its client goes away
LEARNED = "dss.learned"  # what a good request's head said, and of which generation the keys were


# Failures that do not wait for the rest of a body, which may be long or never come.
LEAVE_BODY = (QueueFull, limits.BodyTimeout, limits.BodyTooLarge, limits.TooManyBytes)


class RequestHead(NamedTuple):
    """What a head says, whatever the codec."""

    head: Any  # for the path
    seconds: float  # until the answer must be there
    length: bytes | None  # of the body, as announced


class TraceHeaders(NamedTuple):
    """What a client calls its request."""

    request_id: bytes | None = None
    traceparent: bytes | None = None
    tracestate: bytes | None = None


NO_TRACE_HEADERS = TraceHeaders()


def read_lead(
    path: InferenceHandler[Any], headers: Iterable[Header], query_string: bytes
) -> RequestHead:
    seconds = path.state.settings.limits.request_seconds
    length = None
    for name, value in headers:
        if name == TIMEOUT:
            seconds = min(seconds, _seconds(value))
        elif name == b"content-length":
            length = value
    return RequestHead(path.read_head(headers, query_string), seconds, length)


def _seconds(value: bytes) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise InvalidField("DSS-Timeout must be a positive number of seconds.")
    return seconds


def read_marks(headers: Iterable[Header]) -> TraceHeaders:
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name == b"tracestate" and name in found:
            found[name] += b"," + value
        elif name in (ID_HEADER, b"traceparent", b"tracestate"):
            found[name] = value
    if not found:
        return NO_TRACE_HEADERS
    return TraceHeaders(found.get(ID_HEADER), found.get(b"traceparent"), found.get(b"tracestate"))


class InferenceRequest:
    """The steps of one request, in their order. Nothing is awaited here."""

    # Here rather than set one by one: most requests are over in microseconds.
    _target: Target | None = None
    _asked: Asked | None = None
    _body_bytes = 0
    _decoded = _computed = 0.0

    def __init__(
        self,
        path: InferenceHandler[Any],
        place: Place,
        url: str,
        arrived: float,
        marks: TraceHeaders = NO_TRACE_HEADERS,
    ) -> None:
        self._path = path
        self._place = place
        self._url = url
        self._arrived = arrived
        self._marks = marks
        sent = marks.request_id
        self._request_id = request_ids.new() if sent is None else request_ids.accepted(sent)

    def find(self) -> Target:
        self._target = target = self._path.target(self._place)
        return target

    def admit(self) -> Target:
        """Refuse at once what there is no room for: its body is not even looked at."""
        budget = self._path.state.budget
        if budget.taken > budget.most:
            budget.take(0)
        target = self.find()
        target.model.batcher.admit()
        return target

    def ask(
        self, target: Target, lead: RequestHead, body: bytes
    ) -> "Answered | asyncio.Future[Answered]":
        """`target` must be what was found in this turn of the event loop: it may change."""
        self._body_bytes = len(body)
        path = self._path
        self._asked = asked = path.read_body(lead.head, body)
        seconds = lead.seconds if asked.seconds is None else min(lead.seconds, asked.seconds)
        deadline = self._arrived + seconds
        self._decoded = perf_counter()
        if self._decoded > deadline:
            raise DeadlineExceeded(f"The answer could not be given in {seconds:g} seconds.")
        return path.ask(target, asked, deadline)

    def answer(self, lead: RequestHead, answer: Answered) -> tuple[list[Header], bytes]:
        """The headers and content of a good answer. It is counted, because it leaves now."""
        assert self._target is not None and self._asked is not None  # noqa: S101
        watching = self._path.state.journal.watching
        if watching:
            self._computed = perf_counter()
        headers, content = self._path.encode(lead.head, self._asked, self._target, answer)
        headers.append((ID_HEADER, self._request_id))
        finished = perf_counter()
        # Counted before it leaves, so that a client that has its answer finds it counted.
        self._target.good.answered(finished - self._arrived)
        if watching:
            self._tell(200, finished, None, answer, len(content))
        return headers, content

    def failure(self, error: Exception) -> Response:
        """The answer to a request that failed. It is counted."""
        state, route = self._path.state, self._place.route
        model = "" if self._target is None else self._target.model.name
        reason = problems.reason(error) if isinstance(error, DSSError) else "unknown_failure"
        if isinstance(error, DSSError):
            state.metrics.rejected(model, reason)
        answer: Response
        try:
            if isinstance(error, QueueFull):
                answer = problems.of_full_queue(error, self._url)
            else:
                answer = problems.of_failure(error, {"path": self._url})
        except Exception:  # not one that clients may see
            named = {"request_id": self._request_id.decode()}
            logger.error("POST %s failed.", route, exc_info=error, extra=named)
            answer = problems.of_unknown_failure({"path": self._url})
        answer.raw_headers.append((ID_HEADER, self._request_id))
        finished = perf_counter()
        status = answer.status_code
        state.metrics.http.answered(route, "POST", status, finished - self._arrived)
        if self._target is not None:
            self._target.model.metrics.failed(finished - self._arrived)
        if state.journal.watching or status >= 500:
            self._tell(status, finished, reason, None, len(answer.body))
        return answer

    def _tell(
        self, status: int, finished: float, reason: str | None, answer: Answered | None, size: int
    ) -> None:
        """Tell the journal, if it wants to know."""
        journal, marks = self._path.state.journal, self._marks
        seconds = finished - self._arrived
        wanted = journal.wanted(status, seconds, marks.traceparent, marks.tracestate)
        if wanted is not None:
            event = self._event(status, finished, reason, answer, size)
            journal.finished(event._replace(wanted=wanted))

    def _event(
        self, status: int, finished: float, reason: str | None, answer: Answered | None, size: int
    ) -> RequestEvent:
        target, asked, marks = self._target, self._asked, self._marks
        event = RequestEvent(
            route=self._place.route,
            method="POST",
            status=status,
            request_id=self._request_id.decode(),
            traceparent=_text(marks.traceparent),
            tracestate=_text(marks.tracestate),
            arrived=self._arrived,
            finished=finished,
            reason=reason,
            model="" if target is None else target.model.name,
            version=0 if target is None else target.model.version,
            bytes_in=self._body_bytes,
            bytes_out=size,
            decoded=self._decoded,
            path=self._url,
        )
        if asked is not None:
            event = event._replace(rows=len(asked.hidden), k=asked.k or 0, searched=asked.experts)
        if answer is None:
            return event
        if isinstance(answer, TopK):  # the call was this request's alone, and made at once
            started, gate_seconds = self._decoded, answer.gate_seconds
            expert_seconds = float(answer.expert_seconds.sum())
            computed = self._computed
        else:
            started, computed, gate_seconds, seconds = answer.call
            expert_seconds = float(seconds.sum())
        return event._replace(
            k=answer.classes.shape[1],
            experts=answer.experts,
            started=started,
            computed=computed,
            gate_seconds=gate_seconds,
            expert_seconds=expert_seconds,
        )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


@contextmanager
def closing_on_failure(body: bytes | Coroutine[Any, Any, bytes]) -> Iterator[None]:
    """A body that nobody will read must not be left half begun."""
    try:
        yield
    except BaseException:
        if not isinstance(body, bytes):
            body.close()
        raise


async def answer(
    path: InferenceHandler[Any], place: Place, scope: Scope, receive: Receive, send: Send
) -> None:
    """A request as ASGI brings it."""
    headers, state = scope["headers"], path.state
    exchange = InferenceRequest(path, place, scope["path"], perf_counter(), read_marks(headers))
    pending, body_is_read = None, False
    try:
        generation = state.access.generation
        state.access.check("POST", scope["path"], headers)
        exchange.find()
        lead = read_lead(path, headers, scope["query_string"])
        body = limits.read_body(receive, lead.length, state.settings.limits, state.budget)
        body_is_read = isinstance(body, bytes)
        with closing_on_failure(body):
            exchange.admit()
        if not isinstance(body, bytes):
            body = await body
            body_is_read = True
        found = exchange.ask(exchange.find(), lead, body)
        if isinstance(found, asyncio.Future):
            scope[PENDING] = pending = found
            found = await found
            scope[PENDING] = pending = None
        good, content = exchange.answer(lead, found)
    except ClientDisconnect:
        logger.debug("A client left before its request was complete.")
        return
    except asyncio.CancelledError:
        if pending is not None and pending.cancelled():
            return  # its client has left
        raise
    except Exception as error:
        response = exchange.failure(error)
        if isinstance(error, LEAVE_BODY) and not body_is_read:
            response = problems.EarlyAnswer(response)
        await response(scope, receive, send)
        return
    scope[LEARNED] = lead, generation
    del exchange, body, found  # the client may take long to read what was made of them
    await send({"type": "http.response.start", "status": 200, "headers": good})
    await send({"type": "http.response.body", "body": content})
