"""A client that asks for another protocol is answered in this one."""

import shutil
import subprocess
from itertools import product
from pathlib import Path

import orjson
import pytest
from helpers.raw_http import Connection, request
from helpers.serving.connection_ways import Way, served

WISH = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
INSIDE = b"GET /livez HTTP/1.1\r\n\r\n"  # as a body: it must not be answered


HOW = ("whole", "head and body", "bytes")


def pieces(sent: bytes, how: str) -> list[bytes]:
    if how == "bytes":
        return [sent[at : at + 1] for at in range(len(sent))]
    if how == "head and body":
        head = sent.index(b"\r\n\r\n") + 4
        return [sent[:head], sent[head:]]
    return [sent]


@pytest.mark.parametrize("wish", [WISH, "Connection: upgrade\r\nUpgrade: websocket\r\n"])
def test_the_request_is_answered_and_the_connection_goes_on(
    tmp_path: Path, way: Way, wish: str
) -> None:
    with served(tmp_path, way) as server, Connection(server.port) as connection:
        for value, how in enumerate([*HOW, *HOW]):
            for piece in pieces(request(value, more=wish), how):
                connection.send(piece)
            assert connection.classes() == [[value]]
            connection.send(request(7))
            assert connection.classes() == [[7]]
        connection.send(f"GET /livez HTTP/1.1\r\nHost: x\r\n{wish}\r\n".encode())
        assert connection.answer()[0] == 200


def test_its_body_is_never_a_request(tmp_path: Path, way: Way) -> None:
    chunked = (
        f"POST /topk HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{WISH}"
        f"Transfer-Encoding: chunked\r\n\r\n{len(INSIDE):x}\r\n"
    ).encode() + (INSIDE + b"\r\n0\r\n\r\n")
    with served(tmp_path, way) as server, Connection(server.port) as connection:
        for sent, how in product((request(0, INSIDE, more=WISH), chunked), HOW):
            for piece in pieces(sent, how):
                connection.send(piece)
            assert connection.answer()[0] == 400  # it is not JSON
            connection.send(request(7))
            assert connection.classes() == [[7]]


def test_several_in_one_packet(tmp_path: Path, way: Way) -> None:
    with served(tmp_path, way) as server, Connection(server.port) as connection:
        connection.send(b"".join(request(value, more=WISH) for value in range(5)))
        assert [connection.classes() for _ in range(5)] == [[[value]] for value in range(5)]


def test_what_only_asks_for_something_else_is_400(tmp_path: Path, way: Way) -> None:
    with served(tmp_path, way) as server:
        for asked in (b"CONNECT a:1", b"CONNECT /topk", b"PRI *"):
            with Connection(server.port) as connection:
                connection.send(asked + b" HTTP/1.1\r\nHost: a:1\r\n\r\n" + INSIDE)
                status, headers, _ = connection.answer()
                assert (status, headers["connection"]) == (400, "close")
                assert connection.ended()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_with_http2(tmp_path: Path, way: Way) -> None:
    with served(tmp_path, way) as server:
        url = f"http://127.0.0.1:{server.port}/topk"
        kind = ("-H", "Content-Type: application/json")
        answers = subprocess.run(
            ["curl", "-sS", "--http2", *kind, "-d", request(9)[-36:], url, url],
            capture_output=True,
            check=True,
        ).stdout
        assert answers.count(b'"classes":[[9]]') == 2
        assert orjson.loads(answers[: len(answers) // 2])["classes"] == [[9]]
