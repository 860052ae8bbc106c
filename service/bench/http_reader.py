"""Reads HTTP/1.1 answers with a Content-Length, as cheaply as Python can.

It imports nothing of the project, so that a load generator's process stays small.
"""

import json
import re

END_OF_HEAD = b"\r\n\r\n"
LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)
STATUS = slice(9, 12)  # of "HTTP/1.1 200 OK"


class AnswerNotUnderstood(Exception):
    """The bytes are no HTTP/1.1 answer with a Content-Length."""


class Answer:
    """One answer at a time, from packets that may be cut anywhere."""

    __slots__ = ("_ends", "_received")

    def __init__(self) -> None:
        self._received = b""
        self._ends = 0

    def feed(self, packet: bytes) -> bytes | None:
        """The whole answer if `packet` completes it; the next packet then begins a new one."""
        received = self._received + packet if self._received else packet
        ends = self._ends
        if not ends:
            head_ends = received.find(END_OF_HEAD)
            if head_ends < 0:
                self._received = received
                return None
            found = LENGTH.search(received, 0, head_ends)
            if found is None or not received.startswith(b"HTTP/1."):
                raise AnswerNotUnderstood
            ends = head_ends + len(END_OF_HEAD) + int(found[1])
        if len(received) < ends:
            self._received = received
            self._ends = ends
            return None
        if len(received) > ends:
            raise AnswerNotUnderstood
        self._received = b""
        self._ends = 0
        return received


def is_ok(answer: bytes) -> bool:
    return answer[STATUS] == b"200"


def problem(answer: bytes) -> str:
    """What an answer that is not OK complains about."""
    status = answer[STATUS].decode("ascii", "replace")
    try:
        detail = json.loads(answer.partition(END_OF_HEAD)[2])["detail"]
    except (ValueError, KeyError, TypeError):
        return f"status {status}"
    return f"status {status}: {detail}"
