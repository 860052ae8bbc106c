"""Bad input over HTTP is a problem document, and the service goes on."""

import pickle
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from helpers.npy_bytes import npy_bytes
from helpers.server import Running
from helpers.tiny_bundle import N_CLASSES, WIDTH, rows_for

JSON = {"content-type": "application/json"}
NPY = {"content-type": "application/x-npy"}


def assert_problem(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert set(problem) == {"type", "title", "status", "detail", "instance"}
    assert problem["status"] == status
    assert "Traceback" not in response.text
    return problem


def assert_answers(client: httpx.Client) -> None:
    response = client.post("/topk", json={"inputs": rows_for(1).tolist(), "k": 1})
    assert response.status_code == 200
    assert response.json()["experts"] == [1]


# --- bad input -------------------------------------------------------------------------------

ROW = [0.5] * WIDTH


def json_body(inputs: object, **more: object) -> bytes:
    return orjson.dumps({"inputs": inputs, **more})


def forged_npy(shape: str) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(16)


OBJECTS = npy_bytes(np.array([[{"a": 1}]], object))

BAD: dict[str, tuple[int, bytes, dict[str, str]]] = {
    "not json": (400, b"not json", JSON),
    "empty body": (400, b"", JSON),
    "cut json": (400, json_body([ROW])[:-3], JSON),
    "json nan": (400, b'{"inputs": [[NaN, 1, 2, 3]]}', JSON),
    "ragged rows": (422, json_body([ROW, ROW[:2]]), JSON),
    "strings": (422, json_body([["1", "2", "3", "4"]]), JSON),
    "nulls": (422, json_body([[1, None, 3, 4]]), JSON),
    "booleans": (422, json_body([[1, True, 3, 4]]), JSON),
    "empty batch": (422, json_body([]), JSON),
    "empty row": (422, json_body([[]]), JSON),
    "flat row": (422, json_body(ROW), JSON),
    "wrong width": (422, json_body([ROW[:3]]), JSON),
    "too big for float32": (422, json_body([[1e39, 0, 0, 0]]), JSON),
    "no inputs": (422, b"{}", JSON),
    "unknown key": (422, json_body([ROW], temperature=1), JSON),
    "not an object": (422, b"[1]", JSON),
    "k zero": (422, json_body([ROW], k=0), JSON),
    "k too large": (422, json_body([ROW], k=N_CLASSES + 1), JSON),
    "k beyond the limit": (422, json_body([ROW], k=10**15), JSON),
    "k a string": (422, json_body([ROW], k="3"), JSON),
    "experts zero": (422, json_body([ROW], experts=0), JSON),
    "experts too many": (422, json_body([ROW], experts=4), JSON),
    "10 MB of json": (413, b" " * 10_000_000, JSON),
    "10 MB of npy": (413, npy_bytes(np.zeros((625_000, WIDTH), np.float32)), NPY),
    "too many rows": (413, npy_bytes(np.zeros((4097, WIDTH), np.float32)), NPY),
    "integers": (422, npy_bytes(np.ones((1, WIDTH), np.int32)), NPY),
    "npy nan": (422, npy_bytes(np.full((1, WIDTH), np.nan, np.float32)), NPY),
    "npy infinity": (422, npy_bytes(np.full((1, WIDTH), np.inf, np.float32)), NPY),
    "npy vector": (422, npy_bytes(np.ones(WIDTH, np.float32)), NPY),
    "npy fortran": (422, npy_bytes(np.asfortranarray(np.ones((2, WIDTH), np.float32))), NPY),
    "npy objects": (422, OBJECTS, NPY),
    "pickle": (400, pickle.dumps([ROW]), NPY),
    "npy giant shape": (400, forged_npy("(1000000000000, 4)"), NPY),
    "npy negative shape": (400, forged_npy("(-1, 4)"), NPY),
    "npy wrong bytes": (400, forged_npy("(2, 4)"), NPY),
    "json called npy": (400, json_body([ROW]), NPY),
    "npy called json": (400, npy_bytes(np.ones((1, WIDTH), np.float32)), JSON),
    "no content type": (415, json_body([ROW]), {}),
    "form": (415, b"inputs=1", {"content-type": "application/x-www-form-urlencoded"}),
    "not gzip": (400, json_body([ROW]), JSON | {"content-encoding": "gzip"}),
    "brotli": (415, json_body([ROW]), JSON | {"content-encoding": "br"}),
    "accept html": (406, json_body([ROW]), JSON | {"accept": "text/html"}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_problem_and_the_service_goes_on(http: httpx.Client, name: str) -> None:
    status, content, headers = BAD[name]
    problem = assert_problem(http.post("/topk", content=content, headers=headers), status)
    assert problem["instance"] == "/topk"
    assert problem["detail"].endswith(".")
    assert_answers(http)


@pytest.mark.parametrize(
    "path",
    [
        "/models/nobody/topk",
        "/models/tiny/versions/7/topk",
        "/models/tiny/versions/3/topk",
        "/models/tiny/versions/x/topk",
        "/models/%2e%2e/topk",
        "/models/..%2f..%2fetc/topk",
        "/models/tiny/versions/1/topk/",
        "/nothing",
        "/topk/",
    ],
)
def test_unknown_models_and_paths_are_404(http: httpx.Client, path: str) -> None:
    assert_problem(http.post(path, json={"inputs": [ROW]}), 404)
    assert_answers(http)


@pytest.mark.parametrize("path", ["/models/nobody", "/models/nobody/experts", "/nothing"])
def test_unknown_resources_are_404(http: httpx.Client, path: str) -> None:
    assert_problem(http.get(path), 404)


def test_a_wrong_method_is_405(http: httpx.Client) -> None:
    response = http.get("/topk")
    assert_problem(response, 405)
    assert response.headers["allow"] == "POST"
    assert_problem(http.post("/livez"), 405)
    both = http.options("/v2/logging")
    assert (both.status_code, both.headers["allow"]) == (405, "GET, POST")


@pytest.mark.parametrize("query", ["k=x", "k=1&k=2", "k=", "inputs=1", "colour=red", "k=0"])
def test_wrong_query_strings_are_422(http: httpx.Client, query: str) -> None:
    content = npy_bytes(rows_for(0))
    assert_problem(http.post(f"/topk?{query}", content=content, headers=NPY), 422)
    assert_answers(http)


def test_a_json_body_with_a_query_string_is_422(http: httpx.Client) -> None:
    assert_problem(http.post("/topk?k=3", json={"inputs": [ROW]}), 422)


def test_a_chunked_body_is_cut_off_at_the_limit(http: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b" " * 65_536

    assert_problem(http.post("/topk", content=endless(), headers=JSON), 413)
    assert_answers(http)


def raw_exchange(server: Running, request: bytes) -> bytes:
    """Send bytes as they are, and read until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def test_an_announced_giant_is_refused_before_it_comes(server: Running, http: httpx.Client) -> None:
    head = (
        b"POST /topk HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1000000000000\r\nExpect: 100-continue\r\n\r\n"
    )
    answer = raw_exchange(server, head)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"application/problem+json" in answer
    assert_answers(http)


@pytest.mark.parametrize("length", [b"-1", b"x", b"9" * 50])
def test_a_nonsense_length_is_a_client_error(
    server: Running, http: httpx.Client, length: bytes
) -> None:
    head = b"POST /topk HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    answer = raw_exchange(server, head + b"Content-Length: " + length + b"\r\n\r\n{}")
    assert answer.startswith(b"HTTP/1.1 4")
    assert_answers(http)


def test_a_client_that_leaves_halfway_harms_nobody(server: Running, http: httpx.Client) -> None:
    head = b"POST /topk HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(head + b'Content-Length: 100\r\n\r\n{"inputs"')
    assert_answers(http)
    assert "Traceback" not in server.log.read_text()
