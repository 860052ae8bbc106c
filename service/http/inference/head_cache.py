"""Heads of requests that are known byte for byte, and what they ask for.

A client sends the same head again and again, but for lines that name the single request; those
are cut out before a head is kept or looked up.
"""

import re
from typing import Any, NamedTuple

from service.http.inference import handler
from service.http.inference.handler import InferenceHandler, Place
from service.http.inference.request import NO_TRACE_HEADERS, RequestHead, TraceHeaders

HEADS_KEPT = 256
LONGEST_HEAD = 2048
# A head with several of one of these stays unknown: the last would stand for all.
VARYING = re.compile(rb"\r\n(x-request-id|traceparent|tracestate): ?([^\r\n]*)", re.IGNORECASE)
# A request with one of these asks for more than an answer.
UNUSUAL = {b"expect", b"origin", b"transfer-encoding", b"upgrade"}


class Known(NamedTuple):
    """What a head asks for."""

    path: InferenceHandler[Any]
    place: Place
    url: str
    lead: RequestHead
    length: int  # of the body
    generation: int  # of the keys that allowed it


class HeadCache:
    """The heads that all connections know."""

    def __init__(self, topk: InferenceHandler[Any], infer: InferenceHandler[Any]) -> None:
        self._topk = topk
        self._infer = infer
        self._access = topk.state.access
        self._max_body_bytes = topk.state.settings.limits.max_body_bytes
        self._known: dict[bytes, Known] = {}

    def find(self, head: bytes) -> tuple[Known, TraceHeaders] | None:
        known, marks = self._known.get(head), NO_TRACE_HEADERS
        if known is None and len(head) <= LONGEST_HEAD:
            lines = VARYING.findall(head)
            found = {name.lower(): value for name, value in lines}
            if found and len(found) == len(lines):
                known = self._known.get(VARYING.sub(b"", head))
                marks = TraceHeaders(
                    found.get(b"x-request-id"), found.get(b"traceparent"), found.get(b"tracestate")
                )
        if known is None or known.generation != self._access.generation:
            return None
        return known, marks

    def learn(self, head: bytes, scope: Any, lead: RequestHead, generation: int) -> None:  # noqa: ANN401
        """Keep what came of a head, if it is a usual request for top-k."""
        if scope["method"] != "POST" or scope["http_version"] != "1.1" or len(head) > LONGEST_HEAD:
            return
        place = handler.place(scope["path"])
        headers = scope["headers"]
        lengths = [value for name, value in headers if name == b"content-length"]
        if place is None or len(lengths) != 1 or UNUSUAL & {name for name, _ in headers}:
            return
        length = int(lengths[0])
        if length > self._max_body_bytes:
            return
        if len(self._known) >= HEADS_KEPT:
            self._known.clear()
        path = self._topk if place.native else self._infer
        known = Known(path, place, scope["path"], lead, length, generation)
        self._known[VARYING.sub(b"", head)] = known
