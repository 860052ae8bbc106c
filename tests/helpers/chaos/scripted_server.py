"""A server that answers as a test tells it to, and the answers that an engine would give."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from benchmarks.chaos.harness.answer_check import Question


def answer(body: bytes, status: int = 200, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d OK\r\ncontent-length: %d\r\n%b\r\n%b" % (status, len(body), more, body)


def right(question: Question, version: int = 1) -> bytes:
    reply = question.expected[version][0]
    document = {"version": version}
    document |= {name: getattr(reply, name).tolist() for name in reply._fields[1:]}
    return answer(json.dumps(document).encode())


@contextmanager
def server(reply: Callable[[bytes], bytes | None]) -> Iterator[int]:
    """Says what it is told to for each request; None ends the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                while request := connection.recv(2**20):
                    said = reply(request)
                    if said is None:
                        return
                    connection.sendall(said)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=serve, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
