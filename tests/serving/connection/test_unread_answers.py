"""Clients that do not read their answers: what they hold is counted, and they are cut off."""

import asyncio
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import orjson
import pytest
from helpers.raw_http import Connection, request
from helpers.server import wait_until
from helpers.serving.connection_ways import Way, contexts, served, slow_socket

from service.http.body import ByteBudget
from service.http.inference.connection.paced_transport import PIECE_BYTES, PacedTransport
from service.settings import Limits

Tls = tuple[ssl.SSLContext, ssl.SSLContext]

ROWS, K = 1000, 1000
LARGE = request(0, orjson.dumps({"inputs": [[7, 0, 0, 0]] * ROWS, "k": K}))  # 9 MB of answer


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest) -> Iterator[Tls | None]:
    return contexts() if request.param == "tls" else None


def read_answer(connection: socket.socket) -> bytes:
    received = bytearray()
    size = None
    while size is None or len(received) < size:
        received += connection.recv(2**20) or pytest.fail("the connection ended")
        head_ends = received.find(b"\r\n\r\n")
        if size is None and head_ends > 0:
            length = re.search(rb"content-length: (\d+)", received)
            assert length is not None
            size = head_ends + 4 + int(length[1])
    return bytes(received[received.find(b"\r\n\r\n") + 4 :])


def test_it_is_counted_until_it_is_read(tmp_path: Path, way: Way, tls: Tls | None) -> None:
    with served(tmp_path, way, tls=tls) as server:
        client = None if tls is None else tls[1]
        with slow_socket(server.port, client) as connection:
            for _ in range(2):  # the second time the request head is known
                connection.sendall(LARGE)
                wait_until(lambda: server.budget.taken > 2**20)
                classes = orjson.loads(read_answer(connection))["classes"]
                assert classes == [list(range(7, 7 + K))] * ROWS
                wait_until(lambda: server.budget.taken == 0)
            connection.sendall(request(5))
            assert orjson.loads(read_answer(connection))["classes"] == [[5]]


def test_who_does_not_read_is_cut_off(tmp_path: Path, way: Way, tls: Tls | None) -> None:
    limits = Limits(read_seconds=0.5)
    with served(tmp_path, way, tls=tls, limits=limits) as server:
        client = None if tls is None else tls[1]
        for more in (b"", LARGE):  # known by then
            with slow_socket(server.port, client) as connection:
                connection.sendall(LARGE + more)
                wait_until(lambda: server.budget.taken > 2**20)
                wait_until(lambda: not server.connections())
                wait_until(lambda: server.budget.taken == 0)
                with suppress(OSError):
                    while connection.recv(2**20):
                        pass


def test_the_kernel_does_not_hide_that_an_answer_is_unread(
    tmp_path: Path, way: Way, tls: Tls | None
) -> None:
    rows = 300  # 3 MB of answer: all of it would find room in the kernel
    limits = Limits(read_seconds=0.5)
    asked = request(0, orjson.dumps({"inputs": [[7, 0, 0, 0]] * rows, "k": K}))
    with served(tmp_path, way, tls=tls, limits=limits) as server:
        client = None if tls is None else tls[1]
        with slow_socket(server.port, client, room=None) as connection:
            connection.sendall(asked)
            wait_until(lambda: server.budget.taken > 2**20)
            wait_until(lambda: not server.connections())


def test_who_asked_for_the_end_and_does_not_read_is_cut_off(
    tmp_path: Path, way: Way, tls: Tls | None
) -> None:
    limits = Limits(read_seconds=0.5)
    closing = LARGE.replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n")
    with served(tmp_path, way, tls=tls, limits=limits) as server:
        client = None if tls is None else tls[1]
        with slow_socket(server.port, client) as connection:
            connection.sendall(closing)
            wait_until(lambda: server.budget.taken > 2**20)
            wait_until(lambda: not server.connections())
            wait_until(lambda: server.budget.taken == 0)


def test_others_are_refused_while_too_much_is_unread(
    tmp_path: Path, way: Way, tls: Tls | None
) -> None:
    with served(tmp_path, way, tls=tls) as server:
        client = None if tls is None else tls[1]
        with slow_socket(server.port, client) as unread, slow_socket(server.port, client) as other:
            unread.sendall(LARGE)
            wait_until(lambda: any(one._unread_answer for one in server.connections()))
            server.budget.most = 2**20
            other.sendall(request(1))
            assert other.recv(65_536).startswith(b"HTTP/1.1 429 ")
            read_answer(unread)
            wait_until(lambda: server.budget.taken == 0)
            other.sendall(request(1))
            assert orjson.loads(read_answer(other))["classes"] == [[1]]


def test_a_client_that_leaves_leaves_nothing(tmp_path: Path, way: Way, tls: Tls | None) -> None:
    with served(tmp_path, way, tls=tls) as server:
        client = None if tls is None else tls[1]
        with slow_socket(server.port, client) as connection:
            connection.sendall(LARGE)
            wait_until(lambda: server.budget.taken > 2**20)
        wait_until(lambda: not server.connections())
        wait_until(lambda: server.budget.taken == 0)
        if tls is None:
            with Connection(server.port) as other:
                other.send(request(3))
                assert other.classes() == [[3]]


# --- the transport itself --------------------------------------------------------------------


class Full(asyncio.Transport):
    """A transport whose client reads when the test says so; it says that it is full as others do:
    while it is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.held = bytearray()
        self.sent = bytearray()
        self.ended: str | None = None
        self.paced: PacedTransport | None = None

    def get_extra_info(self, name: str, default: object = None) -> object:
        return Mock(spec=socket.socket) if name == "socket" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return len(self.held)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.held += data
        if len(self.held) > PIECE_BYTES and self.paced is not None:
            self.paced.transport_full()

    def read(self) -> None:
        self.sent += self.held
        self.held.clear()
        assert self.paced is not None
        self.paced.transport_ready()

    def pause_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.ended is not None

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


@pytest.fixture
def full() -> Full:
    return Full()


def test_a_transport_is_given_little_more_than_it_can_send(full: Full) -> None:
    budget, blocked = ByteBudget(2**30), list[bool]()
    full.paced = paced = PacedTransport(full, budget, blocked.append)
    content = bytes(range(256)) * 4096
    paced.write(b"head")
    assert budget.taken == 0
    paced.write(content)
    paced.write(b"next")
    paced.close()
    assert paced.is_closing() and not full.is_closing()
    while full.held:
        assert len(full.held) <= 2 * PIECE_BYTES
        unsent = len(b"head" + content + b"next") - len(full.sent)
        assert budget.taken in (unsent, 0)  # the last piece is no longer waited for
        full.read()
    assert full.sent == b"head" + content + b"next"
    assert (blocked, budget.taken, full.ended) == ([True, False], 0, "closed")


def test_an_aborted_answer_is_let_go_of(full: Full) -> None:
    budget = ByteBudget(2**30)
    full.paced = paced = PacedTransport(full, budget, lambda _: None)
    content = bytearray(2**20)
    paced.write(content)
    assert budget.taken == len(content)
    paced.abort()
    assert (budget.taken, full.ended) == (0, "aborted")
    content.clear()  # fails if anything still looks at it
    paced.write(bytes(2**20))
    assert budget.taken == 0
