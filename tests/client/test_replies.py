"""What clients make of replies, by servers that answer byte for byte."""

import pytest
from helpers.client.clients import Connect
from helpers.client.scripted_server import answer, records, scripted, top_k
from hypothesis import given
from hypothesis import strategies as st

from service.client import AnswerMalformed
from service.client.http1 import DEFAULT_LIMITS, ReplyReader

ROW = [1.0, 2.0, 3.0, 4.0]
NPY = {"content_type": "application/x-npy", "dss_model": "scripted", "dss_model_version": "1"}


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
    reader = ReplyReader(DEFAULT_LIMITS)
    found = []
    for _ in range(2):  # a connection has more than one
        rest = whole
        for cut in cuts:
            if len(rest) > cut:
                found.append(reader.feed(rest[:cut]))
                rest = rest[cut:]
        found.append(reader.feed(rest))
    replies = [reply for reply in found if reply is not None]
    assert [(reply.status, reply.body, reply.keep_alive) for reply in replies] == [
        (200, body, True)
    ] * 2
    assert replies[0].header(b"dss-model") == "scripted"
    assert b"link" not in replies[0].headers


def test_replies_of_every_form_are_answers(connect_once: Connect) -> None:
    body = records(1)
    early = b"HTTP/1.1 100 Continue\r\n\r\n" + top_k()
    with scripted(top_k(), chunked(body, 7), early, unmeasured(body)) as server:
        client = connect_once(server.url)
        for _ in range(4):
            assert client.topk(ROW, k=2).classes.tolist() == [[0, 1]]
    assert server.connections == 1


def test_one_message_holds_head_and_rows(connect_once: Connect) -> None:
    with scripted(top_k()) as server:
        connect_once(server.url, api_key="secret").topk(ROW, k=2)
    (head, body) = server.requests[0]
    assert head.split("\r\n") == [
        "POST /topk?k=2 HTTP/1.1",
        f"Host: 127.0.0.1:{server.port}",
        "User-Agent: dss-client",
        "Authorization: Bearer secret",
        "Content-Type: application/x-npy",
        "Accept: application/x-npy",
        "DSS-Timeout: 10",
        f"Content-Length: {len(body)}",
    ]


def test_requests_of_one_kind_have_one_head(connect_once: Connect) -> None:
    """The server keeps heads that it knows, and answers these faster."""
    with scripted(*[top_k()] * 5) as server:
        client = connect_once(server.url)
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
def test_what_is_no_answer_is_called_so(connect_once: Connect, raw: bytes, sentence: str) -> None:
    with scripted(raw) as server, pytest.raises(AnswerMalformed, match=sentence):
        connect_once(server.url).topk(ROW, k=2)


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
def test_json_that_is_no_answer_is_called_so(connect_once: Connect, document: bytes) -> None:
    raw = answer(200, document, content_type="application/json")
    with scripted(raw) as server, pytest.raises(AnswerMalformed):
        connect_once(server.url).topk(ROW, k=2, labels=True)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"models": 3}', b'{"models": [{"name": "x"}]}'])
def test_facts_that_are_none_are_called_so(connect_once: Connect, body: bytes) -> None:
    with scripted(answer(200, body)) as server, pytest.raises(AnswerMalformed, match="/models"):
        connect_once(server.url).models()
