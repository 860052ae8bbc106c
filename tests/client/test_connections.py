"""What clients do when connections end, stall or are shared; the servers answer byte for byte."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import numpy as np
import pytest
from helpers.client.clients import Connect
from helpers.client.scripted_server import HANG_UP, answer, scripted, top_k
from helpers.server import free_port

from service.client import (
    AsyncClient,
    Client,
    ClientClosed,
    DeadlineExceeded,
    QueryRefused,
    Unavailable,
)

ROW = [1.0, 2.0, 3.0, 4.0]


def test_an_idle_connection_that_was_closed_is_replaced_without_a_word(
    connect_once: Connect,
) -> None:
    with scripted(top_k(), HANG_UP, top_k()) as server:
        client = connect_once(server.url)
        client.topk(ROW, k=2)
        assert client.topk(ROW, k=2).classes.tolist() == [[0, 1]]
    assert server.connections == 2


def test_a_server_that_hangs_up_is_unavailable(connect_once: Connect) -> None:
    with scripted(HANG_UP) as server, pytest.raises(Unavailable, match="ended the connection"):
        connect_once(server.url).topk(ROW, k=2)
    half = top_k()[:-5].replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with scripted(half) as server, pytest.raises(Unavailable, match="before its answer was whole"):
        connect_once(server.url).topk(ROW, k=2)


def test_what_a_server_closes_is_not_used_again(connect_once: Connect) -> None:
    closing = top_k().replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
    with scripted(closing, closing, top_k()) as server:
        client = connect_once(server.url)
        for _ in range(3):
            client.topk(ROW, k=2)
    assert server.connections == 3


def test_nobody_there_is_unavailable(connect_once: Connect) -> None:
    port = free_port()
    with pytest.raises(Unavailable, match=f"at http://127.0.0.1:{port} .Connection refused."):
        connect_once(f"http://127.0.0.1:{port}").topk(ROW)
    assert connect_once(f"http://127.0.0.1:{port}").ready() is False


def test_a_silent_server_is_left_at_the_deadline(connect_once: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # accepts, and says nothing
        client = connect_once(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=0.05)
        with pytest.raises(DeadlineExceeded, match=r"within 0\.05 seconds"):
            client.topk(ROW)
        assert client.ready() is False


def test_a_server_that_drips_does_not_stretch_the_deadline(connect_once: Connect) -> None:
    """Each piece comes in time; the whole does not."""
    stop = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65_536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
            while not stop.wait(0.01):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip, args=(listening,))
        thread.start()
        try:
            before = monotonic()
            with pytest.raises(DeadlineExceeded):
                connect_once(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=0.2).topk(
                    ROW
                )
            assert monotonic() - before < 5
        finally:
            stop.set()
            thread.join()


REFUSAL = answer(413, b'{"detail": "Too large."}', connection="close")
LARGE = np.zeros((1, 2**20), np.float32)


@contextmanager
def serving(converse: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of a server for one connection."""

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            converse(connection)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            thread.join()


def test_an_answer_before_the_rows_were_read_is_taken(connect_once: Connect) -> None:
    """A server refuses a large body at once; its word is worth more than a broken pipe."""

    def refuse(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(REFUSAL)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(2**20):
            pass

    with serving(refuse) as url, pytest.raises(QueryRefused, match="Too large"):
        connect_once(url).topk(LARGE)


def test_an_answer_on_a_connection_that_was_reset_is_taken() -> None:
    def refuse(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(REFUSAL)  # what is unread when it is closed makes it a reset

    with (
        serving(refuse) as url,
        Client(url, retries=0) as client,
        pytest.raises(QueryRefused, match="Too large"),
    ):
        client.topk(LARGE)


def test_a_connection_with_something_unsent_is_not_used_again() -> None:
    asked = threading.Event()

    def refuse(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(REFUSAL.replace(b"connection: close\r\n", b"x: y\r\n"))
        asked.wait(30)  # and reads no more

    async def ask(url: str) -> None:
        async with AsyncClient(url, retries=0) as client:
            with pytest.raises(QueryRefused, match="Too large"):
                await client.topk(LARGE)
            assert client._connections._idle == []
            asked.set()

    with serving(refuse) as url:
        asyncio.run(ask(url))


def test_a_closed_client_says_so() -> None:
    with scripted(top_k()) as server:
        client = Client(server.url)
        client.topk(ROW, k=2)
        client.close()
        client.close()
        with pytest.raises(ClientClosed):
            client.topk(ROW, k=2)

    async def asked() -> None:
        async with AsyncClient(server.url) as client:
            pass
        with pytest.raises(ClientClosed):
            await client.topk(ROW, k=2)

    asyncio.run(asked())


def test_an_asynchronous_client_stays_in_its_loop() -> None:
    closing = top_k().replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
    with scripted(closing) as server:
        client = AsyncClient(server.url)
        asyncio.run(client.topk(ROW, k=2))
        with pytest.raises(ClientClosed, match="one event loop"):
            asyncio.run(client.topk(ROW, k=2))


def test_a_call_that_is_cancelled_takes_its_connection_along() -> None:
    """What it asked must not be answered to the next."""
    asked = threading.Event()

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65_536)
            asked.set()
            assert connection.recv(1) == b""  # left
        connection, _ = listening.accept()
        with connection:
            connection.recv(65_536)
            connection.sendall(top_k())

    async def ask(port: int) -> Any:  # noqa: ANN401
        async with AsyncClient(f"http://127.0.0.1:{port}") as client:
            first = asyncio.create_task(client.topk(ROW, k=2))
            await asyncio.to_thread(asked.wait, 30)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            return await client.topk(ROW, k=2)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        found = asyncio.run(ask(listening.getsockname()[1]))
        thread.join()
    assert found.classes.tolist() == [[0, 1]]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # threads, and a fork
def test_a_forked_process_has_connections_of_its_own() -> None:
    with scripted(top_k(), top_k(), top_k()) as server, Client(server.url, retries=0) as client:
        client.topk(ROW, k=2)
        child = os.fork()
        if child == 0:
            os._exit(0 if not client._connections._idle else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        client.topk(ROW, k=2)
    assert server.connections == 1
