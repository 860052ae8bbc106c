"""A server that answers what a test has written down, byte for byte, and keeps what it was sent."""

import io
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from service.npy import answer_record

END = b"\r\n\r\n"
HANG_UP = b""  # instead of an answer


@dataclass
class Scripted:
    port: int
    requests: list[tuple[str, bytes]] = field(default_factory=list)  # heads and bodies
    connections: int = 0
    connection: socket.socket | None = None  # the last

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def scripted(*answers: bytes | Sequence[bytes]) -> Iterator[Scripted]:
    """One answer for each request, in as many pieces as it has; after the last one it hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Scripted(listening.getsockname()[1])
        thread = threading.Thread(target=_serve, args=(listening, server, deque(answers)))
        thread.start()
        try:
            yield server
        finally:
            for ended in (listening, server.connection):
                with suppress(OSError):
                    if ended is not None:
                        ended.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(
    listening: socket.socket, server: Scripted, answers: deque[bytes | Sequence[bytes]]
) -> None:
    while answers:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        server.connections += 1
        server.connection = connection
        with connection, suppress(ConnectionError):
            _converse(connection, server, answers)


def _converse(
    connection: socket.socket, server: Scripted, answers: deque[bytes | Sequence[bytes]]
) -> None:
    while answers:
        request = _request(connection)
        if request is None:
            return
        server.requests.append(request)
        answer = answers.popleft()
        if answer == HANG_UP:
            return
        for piece in [answer] if isinstance(answer, bytes) else answer:
            connection.sendall(piece)
        if isinstance(answer, bytes) and b"connection: close" in answer:
            return


def _request(connection: socket.socket) -> tuple[str, bytes] | None:
    received = b""
    while END not in received:
        data = connection.recv(65_536)
        if not data:
            return None
        received += data
    head, _, body = received.partition(END)
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    while len(body) < length:
        body += connection.recv(65_536)
    return head.decode(), body


def answer(status: int = 200, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Whatever", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + END + body


def records(rows: int = 1, k: int = 2) -> bytes:
    """A .npy body: row r has the classes 10r, 10r + 1, ..."""
    made = np.zeros(rows, answer_record(k))
    made["classes"] = 10 * np.arange(rows)[:, None] + np.arange(k)
    stream = io.BytesIO()
    np.save(stream, made)
    return stream.getvalue()


def top_k(rows: int = 1, k: int = 2, *, version: int = 1) -> bytes:
    """A good answer."""
    return answer(
        200,
        records(rows, k),
        content_type="application/x-npy",
        dss_model="scripted",
        dss_model_version=str(version),
    )
