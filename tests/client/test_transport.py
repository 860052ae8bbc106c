"""What clients make of what arrives on a connection, by servers that answer byte for byte."""

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
from helpers.clients import KINDS
from helpers.scripted_server import HANG_UP, answer, records, scripted, top_k
from helpers.server import free_port
from hypothesis import given
from hypothesis import strategies as st

from service.client import (
    AnswerMalformed,
    AsyncClient,
    Client,
    ClientClosed,
    DeadlineExceeded,
    NotTrusted,
    QueryRefused,
    Unavailable,
    WrongAddress,
    http1,
)
from service.client.http1 import ReplyReader

ROW = [1.0, 2.0, 3.0, 4.0]
NPY = {"content_type": "application/x-npy", "dss_model": "scripted", "dss_model_version": "1"}
Connect = Callable[..., Any]


@pytest.fixture(params=list(KINDS))
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes a client of either kind, which is closed at the end."""
    made: list[Any] = []

    def made_for(url: str, **settings: Any) -> Any:  # noqa: ANN401
        made.append(KINDS[request.param](url, **{"retries": 0, **settings}))
        return made[-1]

    yield made_for
    for client in made:
        client.close()


# --- replies ---------------------------------------------------------------------------------


def chunked(body: bytes, size: int) -> bytes:
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    coded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    head = answer(200, b"", transfer_encoding="chunked", **NPY).replace(
        b"content-length: 0\r\n", b""
    )
    return head + coded + b"0\r\n\r\n"


def unmeasured(body: bytes) -> bytes:
    """An answer that ends with its connection."""
    head = answer(200, b"", connection="close", **NPY)
    return head.replace(b"content-length: 0\r\n", b"") + body


@given(st.lists(st.integers(1, 400), max_size=20), st.sampled_from(["plain", "chunked", "early"]))
def test_a_reply_may_be_cut_anywhere(cuts: list[int], form: str) -> None:
    body = records(3)
    whole = {
        "plain": answer(200, body, **NPY),
        "chunked": chunked(body, 50),
        "early": b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + answer(200, body, **NPY),
    }[form]
    reader = ReplyReader()
    found = []
    for _ in range(2):  # a connection has more than one
        rest = whole
        for cut in cuts:
            if len(rest) > cut:
                found.append(reader.feed(rest[:cut]))
                rest = rest[cut:]
        found.append(reader.feed(rest))
    replies = [reply for reply in found if reply is not None]
    assert [(reply.status, reply.body, reply.keeps) for reply in replies] == [(200, body, True)] * 2
    assert replies[0].header(b"dss-model") == "scripted"
    assert b"link" not in replies[0].headers


def test_replies_of_every_form_are_answers(connect: Connect) -> None:
    body = records(1)
    early = b"HTTP/1.1 100 Continue\r\n\r\n" + top_k()
    with scripted(top_k(), chunked(body, 7), early, unmeasured(body)) as server:
        client = connect(server.url)
        for _ in range(4):
            assert client.topk(ROW, k=2).classes.tolist() == [[0, 1]]
    assert server.connections == 1


def test_one_message_holds_head_and_rows(connect: Connect) -> None:
    with scripted(top_k()) as server:
        connect(server.url, api_key="secret").topk(ROW, k=2)
    (head, body) = server.requests[0]
    assert head.split("\r\n") == [
        "POST /topk?k=2&experts=1 HTTP/1.1",
        f"Host: 127.0.0.1:{server.port}",
        "User-Agent: dss-client",
        "Authorization: Bearer secret",
        "Content-Type: application/x-npy",
        "Accept: application/x-npy",
        "DSS-Timeout: 10",
        f"Content-Length: {len(body)}",
    ]


def test_requests_of_one_kind_have_one_head(connect: Connect) -> None:
    """The server keeps heads that it knows, and answers these faster."""
    with scripted(*[top_k()] * 5) as server:
        client = connect(server.url)
        for _ in range(5):
            client.topk(ROW, k=2)
    assert len({head for head, _ in server.requests}) == 1


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "speaks no HTTP"),
        (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "speaks no HTTP"),
        (answer(200, b"<html>", content_type="text/html"), "not application/x-npy"),
        (answer(200, b"{}"), "not application/x-npy"),
        (answer(200, records(), content_type="application/x-npy"), "dss-model"),
        (answer(200, b"", **NPY), "should hold"),
        (answer(200, b"\x93NUMPY", **NPY), "should hold"),
        (answer(200, records()[:-1], **NPY), "its length is wrong"),
        (answer(200, records(2), **NPY), "1 rows were asked; 2 are answered"),
        (answer(200, records().replace(b"gates", b"gated"), **NPY), "records are not known"),
        (answer(200, records().replace(b"NUMPY\x01", b"NUMPY\x02"), **NPY), "should hold"),
    ],
)
def test_what_is_no_answer_is_called_so(connect: Connect, raw: bytes, sentence: str) -> None:
    with scripted(raw) as server, pytest.raises(AnswerMalformed, match=sentence):
        connect(server.url).topk(ROW, k=2)


@pytest.mark.parametrize(
    "document",
    [
        b"[",
        b"[]",
        b'{"model": "m", "version": 1, "classes": [[1]], "log_probs": [[0]], "gates": [1]}',
        b'{"model": "m", "version": 1, "classes": [1], "log_probs": [0], "experts": 0, "gates": 1}',
        b'{"model": "m", "version": 1, "classes": [["a"]], "log_probs": [[0]], "experts": [0],'
        b' "gates": [1]}',
    ],
)
def test_json_that_is_no_answer_is_called_so(connect: Connect, document: bytes) -> None:
    raw = answer(200, document, content_type="application/json")
    with scripted(raw) as server, pytest.raises(AnswerMalformed):
        connect(server.url).topk(ROW, k=2, labels=True)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"models": 3}', b'{"models": [{"name": "x"}]}'])
def test_facts_that_are_none_are_called_so(connect: Connect, body: bytes) -> None:
    with scripted(answer(200, body)) as server, pytest.raises(AnswerMalformed, match="/models"):
        connect(server.url).models()


# --- connections -----------------------------------------------------------------------------


def test_an_idle_connection_that_was_closed_is_replaced_without_a_word(connect: Connect) -> None:
    with scripted(top_k(), HANG_UP, top_k()) as server:
        client = connect(server.url)
        client.topk(ROW, k=2)
        assert client.topk(ROW, k=2).classes.tolist() == [[0, 1]]
    assert server.connections == 2


def test_a_server_that_hangs_up_is_unavailable(connect: Connect) -> None:
    with scripted(HANG_UP) as server, pytest.raises(Unavailable, match="ended the connection"):
        connect(server.url).topk(ROW, k=2)
    half = top_k()[:-5].replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with scripted(half) as server, pytest.raises(Unavailable, match="before its answer was whole"):
        connect(server.url).topk(ROW, k=2)


def test_what_a_server_closes_is_not_used_again(connect: Connect) -> None:
    closing = top_k().replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
    with scripted(closing, closing, top_k()) as server:
        client = connect(server.url)
        for _ in range(3):
            client.topk(ROW, k=2)
    assert server.connections == 3


def test_nobody_there_is_unavailable(connect: Connect) -> None:
    port = free_port()
    with pytest.raises(Unavailable, match=f"at http://127.0.0.1:{port} .Connection refused."):
        connect(f"http://127.0.0.1:{port}").topk(ROW)
    assert connect(f"http://127.0.0.1:{port}").ready() is False


def test_a_silent_server_is_left_at_the_deadline(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # accepts, and says nothing
        client = connect(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=0.05)
        with pytest.raises(DeadlineExceeded, match=r"within 0\.05 seconds"):
            client.topk(ROW)
        assert client.ready() is False


def test_a_server_that_drips_does_not_stretch_the_deadline(connect: Connect) -> None:
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
                connect(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=0.2).topk(ROW)
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


def test_an_answer_before_the_rows_were_read_is_taken(connect: Connect) -> None:
    """A server refuses a large body at once; its word is worth more than a broken pipe."""

    def refuse(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(REFUSAL)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(2**20):
            pass

    with serving(refuse) as url, pytest.raises(QueryRefused, match="Too large"):
        connect(url).topk(LARGE)


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
            assert client._streams._idle == []
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
            os._exit(0 if not client._sockets._idle else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        client.topk(ROW, k=2)
    assert server.connections == 1


# --- addresses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://localhost:8000", ("localhost", 8000, "localhost:8000", "", False)),
        ("http://localhost", ("localhost", 80, "localhost", "", False)),
        ("https://example.org/", ("example.org", 443, "example.org", "", True)),
        ("https://example.org/dss/", ("example.org", 443, "example.org", "/dss", True)),
        ("http://[::1]:9000/a%20b", ("::1", 9000, "[::1]:9000", "/a%20b", False)),
        ("http://büro.de", ("xn--bro-hoa.de", 80, "xn--bro-hoa.de", "", False)),
    ],
)  # fmt: skip
def test_addresses(url: str, found: tuple[Any, ...]) -> None:
    assert tuple(http1.address(url)) == found


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "",
        "http://",
        "ftp://host",
        "http://host:0",
        "http://host:99999",
        "http://host:port",
        "http://user:password@host",
        "http://host?x=1",
        "http://[::1",
        "http://host/a b",
    ],
)
def test_what_is_no_address_is_called_so(url: str) -> None:
    with pytest.raises(WrongAddress):
        Client(url)


def test_a_path_before_all_paths_is_kept(connect: Connect) -> None:
    with scripted(top_k(), answer(200, b'{"models": []}')) as server:
        client = connect(f"{server.url}/behind/")
        client.topk(ROW, k=2)
        client.models()
    assert [head.split()[1] for head, _ in server.requests] == [
        "/behind/topk?k=2&experts=1",
        "/behind/models",
    ]


def test_an_authority_that_cannot_be_read_is_called_so(tmp_path: Any) -> None:  # noqa: ANN401
    for verify in (tmp_path / "nothing", str(tmp_path / "nothing")):
        with pytest.raises(NotTrusted, match="cannot be read"):
            Client("https://localhost", verify=verify)
