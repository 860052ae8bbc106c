"""Reads HTTP/1.1 answers with a Content-Length, as cheaply as Python can.

It imports nothing of the project, so that a load generator's process stays small.
"""

import json
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

HOST = "127.0.0.1"
END_OF_HEAD = b"\r\n\r\n"
LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)
CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([0-9]{3}) ")
STATUS = slice(9, 12)  # of "HTTP/1.1 200 OK"
WITHOUT_BODY = (b"100", b"204", b"304")
RECEIVE_BYTES = 2**16
MOST_BYTES = 2**26
ANSWER_SECONDS = 5.0  # more is a hang


class ExchangeFailed(Exception):
    """A request was sent, and no answer came that can be read."""


class AnswerNotUnderstood(ExchangeFailed):
    """The bytes are no HTTP/1.1 answer with a Content-Length."""


class NoAnswer(ExchangeFailed):
    """No answer and no end of the connection within the time that is allowed."""


class ConnectionEnded(ExchangeFailed):
    """The server ended the connection where it owed an answer."""


def answer_bytes(received: bytes) -> int | None:
    """How many bytes the first answer takes; None while its head is incomplete."""
    head_ends = received.find(END_OF_HEAD)
    if head_ends < 0:
        return None
    if not received.startswith(b"HTTP/1."):
        raise AnswerNotUnderstood(repr(received[:80]))
    body_starts = head_ends + len(END_OF_HEAD)
    if received[STATUS] in WITHOUT_BODY:
        return body_starts
    length = LENGTH.search(received, 0, head_ends)
    if length is None:
        raise AnswerNotUnderstood(repr(received[:80]))
    return body_starts + int(length[1])


class AnswerReader:
    """One answer at a time, from packets that may be cut anywhere."""

    __slots__ = ("_ends", "_received")

    def __init__(self) -> None:
        self._received = b""
        self._ends: int | None = None

    def feed(self, packet: bytes) -> bytes | None:
        """The whole answer if `packet` completes it; the next packet then begins a new one."""
        received = self._received + packet if self._received else packet
        ends = self._ends or answer_bytes(received)
        if ends is None or len(received) < ends:
            self._received = received
            self._ends = ends
            return None
        if len(received) > ends:
            raise AnswerNotUnderstood("More bytes came than the answer has.")
        self._received = b""
        self._ends = None
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


def statuses(received: bytes) -> list[int]:
    """Of all answers in some bytes, if bodies do not look like status lines."""
    return [int(status) for status in STATUS_LINE.findall(received)]


@dataclass(frozen=True)
class Answer:
    status: int
    head: bytes
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        """By their names in lower case."""
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        fields = (line.partition(":") for line in lines)
        return {name.lower(): value.strip() for name, _, value in fields}

    @property
    def closes(self) -> bool:
        return CLOSE.search(self.head) is not None


class RawConnection:
    """Sends any bytes, also such as no client library would, and reads the answers."""

    def __init__(self, port: int, seconds: float = ANSWER_SECONDS) -> None:
        self.socket = socket.create_connection((HOST, port), seconds)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """All of it, or as much as the server takes before it has enough."""
        try:
            self.socket.sendall(data)
        except TimeoutError as error:
            raise NoAnswer("The server takes no more bytes.") from error
        except OSError:
            pass  # its answer is still to be read

    def answer(self) -> Answer:
        """The next answer; those with status 100 are passed over."""
        while True:
            while (ends := answer_bytes(self._buffer)) is None or len(self._buffer) < ends:
                self._receive()
            whole, self._buffer = self._buffer[:ends], self._buffer[ends:]
            head, _, body = whole.partition(END_OF_HEAD)
            if whole[STATUS] != b"100":
                return Answer(int(whole[STATUS]), head, body)

    def rest(self) -> bytes:
        """Everything until the server ends the connection, which it is told to do."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        with suppress(ConnectionEnded):
            while len(self._buffer) < MOST_BYTES:
                self._receive()
        return self._buffer

    def _receive(self) -> None:
        try:
            packet = self.socket.recv(RECEIVE_BYTES)
        except TimeoutError as error:
            raise NoAnswer("No answer came, nor was the connection closed.") from error
        except OSError as error:
            raise ConnectionEnded(type(error).__name__) from error
        if not packet:
            raise ConnectionEnded("The connection was closed.")
        self._buffer += packet


def ask_once(port: int, request: bytes) -> Answer:
    """On a connection of its own."""
    with RawConnection(port) as connection:
        connection.send(request)
        return connection.answer()
