"""Servers that send more than a client wants to read: both clients give up and keep nothing."""

import pytest
from helpers.client.clients import Connect
from helpers.client.scripted_server import answer, records, scripted, top_k

from service.client import AnswerTooLarge, QueryRefused

ROW = [1.0, 2.0, 3.0, 4.0]
NPY = {"content_type": "application/x-npy", "dss_model": "scripted", "dss_model_version": "1"}
LIMITS = {"max_head_bytes": 20_000, "max_body_bytes": 500_000}
PIECES = 100_000  # far more than any client should read, and than any socket holds
FILLING = b"x" * 65_536


def unmeasured() -> bytes:
    return answer(200, **NPY).replace(b"content-length: 0\r\n", b"")


def chunked() -> bytes:
    return answer(200, transfer_encoding="chunked", **NPY).replace(b"content-length: 0\r\n", b"")


HEADS = {
    "a header without end": [b"HTTP/1.1 200 OK\r\nx: ", *[FILLING] * PIECES],
    "headers without end": [b"HTTP/1.1 200 OK\r\n", *[b"a: b\r\n" * 5000] * PIECES],
    "a reason without end": [b"HTTP/1.1 200 ", *[FILLING] * PIECES],
    "interim replies without end": [b"HTTP/1.1 103 Early\r\na: b\r\n\r\n" * 2000] * PIECES,
}
BODIES = {
    "a length beyond the limit, and nothing else": [
        answer(200, **NPY).replace(b": 0", b": 500001")
    ],
    "a body that ends with the connection": [unmeasured(), *[FILLING] * PIECES],
    "chunks without end": [chunked(), *[b"10000\r\n" + FILLING + b"\r\n"] * PIECES],
    "tiny chunks without end": [chunked(), *[b"2\r\nxx\r\n" * 9000] * PIECES],
    "a chunk extension without end": [chunked(), b"1;", *[FILLING] * PIECES],
    "trailers without end": [chunked(), b"0\r\n", *[b"a: b\r\n" * 9000] * PIECES],
    "a trailer without end": [chunked(), b"0\r\na: ", *[FILLING] * PIECES],
}


@pytest.mark.parametrize("sent", HEADS.values(), ids=HEADS)
def test_a_head_is_read_up_to_its_limit(connect_once: Connect, sent: list[bytes]) -> None:
    with scripted(sent) as server:
        client = connect_once(server.url, timeout=60.0, **LIMITS)
        with pytest.raises(AnswerTooLarge, match="head of the answer has more than 20000 bytes"):
            client.topk(ROW)


@pytest.mark.parametrize("sent", BODIES.values(), ids=BODIES)
def test_a_body_is_read_up_to_its_limit(connect_once: Connect, sent: list[bytes]) -> None:
    with scripted(sent) as server:
        client = connect_once(server.url, timeout=60.0, **LIMITS)
        with pytest.raises(AnswerTooLarge, match="body of the answer has more than 500000 bytes"):
            client.topk(ROW)


def test_what_is_too_large_is_asked_once_and_the_next_answer_is_read(connect: Connect) -> None:
    too_large = answer(200, **NPY).replace(b": 0", b": 500001")
    with scripted(too_large, top_k()) as server:
        client = connect(server.url, timeout=60.0, **LIMITS)
        with pytest.raises(AnswerTooLarge):
            client.topk(ROW, k=2)
        assert client.topk(ROW, k=2).classes.tolist() == [[0, 1]]
    assert (len(server.requests), server.connections) == (2, 2)


def test_each_answer_of_a_connection_has_the_whole_limit(connect_once: Connect) -> None:
    body = records(1)
    with scripted(*[answer(200, body, **NPY)] * 5) as server:
        client = connect_once(server.url, max_head_bytes=4096, max_body_bytes=len(body))
        for _ in range(5):
            assert client.topk(ROW, k=2).classes.tolist() == [[0, 1]]
    assert server.connections == 1


def test_a_limit_is_a_positive_number(connect_once: Connect) -> None:
    for name in LIMITS:
        with pytest.raises(QueryRefused, match=f"{name} is 0; it must be at least 1"):
            connect_once("http://localhost:1", **{name: 0})
