"""HTTP on a bare socket, so that a test may send what no client library would."""

import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from benchmarks.chaos.harness.server_process import ANSWER_SECONDS, HOST

END = b"\r\n\r\n"
LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)
CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([0-9]{3}) ")
MOST_BYTES = 2**26


class Hang(Exception):
    """No answer and no end of the connection within the time that is allowed."""


class Closed(Exception):
    """The server ended the connection where it owed an answer."""


class Garbage(Exception):
    """What came is not HTTP."""


@dataclass(frozen=True)
class Received:
    status: int
    head: bytes
    body: bytes

    @property
    def closes(self) -> bool:
        return CLOSE.search(self.head) is not None


class Wire:
    def __init__(self, port: int, seconds: float = ANSWER_SECONDS) -> None:
        self.socket = socket.create_connection((HOST, port), seconds)
        self.socket.settimeout(seconds)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """All of it, or as much as the server takes before it has enough."""
        try:
            self.socket.sendall(data)
        except TimeoutError as error:
            raise Hang("The server takes no more bytes.") from error
        except OSError:
            pass  # what it said is still to be read

    def answer(self) -> Received:
        """The next answer; those with a status of 1xx are passed over."""
        while True:
            while END not in self._buffer:
                self._more()
            head, _, rest = self._buffer.partition(END)
            line = STATUS_LINE.match(head)
            if line is None:
                raise Garbage(repr(head[:80]))
            status = int(line[1])
            if status < 200:
                self._buffer = rest
                continue
            length = LENGTH.search(head)
            size = int(length[1]) if length and status not in (204, 304) else 0
            while len(self._buffer) < len(head) + len(END) + size:
                self._more()
            ends = len(head) + len(END) + size
            body, self._buffer = self._buffer[len(head) + len(END) : ends], self._buffer[ends:]
            return Received(status, head, body)

    def rest(self) -> bytes:
        """Everything until the server ends the connection, which it is told to do."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        try:
            while len(self._buffer) < MOST_BYTES:
                self._more()
        except Closed:
            pass
        return self._buffer

    def _more(self) -> None:
        try:
            packet = self.socket.recv(2**16)
        except TimeoutError as error:
            raise Hang("No answer came, nor was the connection closed.") from error
        except OSError as error:
            raise Closed(type(error).__name__) from error
        if not packet:
            raise Closed("The connection was closed.")
        self._buffer += packet


def once(port: int, request: bytes) -> Received:
    with Wire(port) as wire:
        wire.send(request)
        return wire.answer()


def statuses(received: bytes) -> list[int]:
    """Of all answers in some bytes, if bodies do not look like status lines."""
    return [int(status) for status in STATUS_LINE.findall(received)]
