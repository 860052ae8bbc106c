"""Request heads that are known byte for byte, and what they ask for.

A client sends the same head again and again, but for lines that name the single request; those
are cut out before a head is kept or looked up.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from service.errors import DSSError
from service.http.inference import routes
from service.http.inference.handler import Header, InferenceHandler, RequestHead
from service.http.inference.routes import NEEDS, Place, Protocol
from service.http.observer import NO_TRACE_HEADERS, TraceHeaders
from service.http.state import AppState

HEADS_KEPT = 256
LONGEST_HEAD = 2048
# A head with several of one of these stays unknown: the last would stand for all. So does one with
# a byte that no header may have, since a line is cut out only up to there.
VARYING = re.compile(
    rb"\r\n(x-request-id|traceparent|tracestate):([\t\x20-\x7e\x80-\xff]*)", re.IGNORECASE
)
# A request with one of these asks for more than an answer.
UNUSUAL = {b"expect", b"origin", b"transfer-encoding", b"upgrade"}


class KnownHead(NamedTuple):
    """What a request head asks for."""

    handler: InferenceHandler[Any]
    place: Place
    path: str
    head: RequestHead
    length: int  # of the body
    generation: int  # of the keys that allowed it


class HeadCache:
    """The request heads that all connections know."""

    def __init__(self, state: AppState, handlers: Mapping[Protocol, InferenceHandler[Any]]) -> None:
        self._handlers = handlers
        self._access = state.access
        self._max_body_bytes = state.settings.limits.max_body_bytes
        self._known: dict[bytes, KnownHead] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, head: bytes) -> tuple[KnownHead, TraceHeaders] | None:
        known, trace = self._known.get(head), NO_TRACE_HEADERS
        if known is None and len(head) <= LONGEST_HEAD:
            lines = VARYING.findall(head)
            found = {name.lower(): value.strip(b" \t") for name, value in lines}
            if found and len(found) == len(lines):
                known = self._known.get(VARYING.sub(b"", head))
                trace = TraceHeaders(
                    found.get(b"x-request-id"), found.get(b"traceparent"), found.get(b"tracestate")
                )
        if known is None or known.generation != self._access.generation:
            return None
        return known, trace

    def learn(self, head: bytes, path: str, headers: list[Header], query_string: bytes) -> None:
        """Keeps what a POST's head asks for, if it is a usual inference request.

        It is parsed as it would be for an answer; what is refused is not kept.
        """
        place = routes.find(path)
        lengths = [value for name, value in headers if name == b"content-length"]
        if place is None or len(lengths) != 1 or UNUSUAL & {name for name, _ in headers}:
            return
        length = int(lengths[0])
        if length > self._max_body_bytes or len(head) > LONGEST_HEAD:
            return
        handler, generation = self._handlers[place.route.protocol], self._access.generation
        if not self._access.allows(NEEDS, headers):
            return
        try:
            meaning = handler.read_request_head(headers, query_string)
        except DSSError:
            return
        if len(self._known) >= HEADS_KEPT:
            self._known.clear()
        known = KnownHead(handler, place, path, meaning, length, generation)
        self._known[VARYING.sub(b"", head)] = known
