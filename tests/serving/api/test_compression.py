"""Compressed bodies and answers, by themselves and as a client of a real server sees them."""

import gzip
import tracemalloc
import zlib

import httpx
import numpy as np
import orjson
import pytest
from helpers.tiny_bundle import WIDTH, rows_for

from service.http import compression
from service.http.codecs import MalformedBody, UnsupportedMediaType
from service.http.compression import (
    CODINGS,
    BodyGrowsTooLarge,
    Coding,
    compressed,
    expand,
    expand_at_once,
    expanded_bytes,
    for_answer,
    of_body,
)
from service.http.pieces import at_once
from service.settings import Limits

GZIP, DEFLATE = CODINGS[b"gzip"], CODINGS[b"deflate"]
PACK = {"gzip": gzip.compress, "deflate": zlib.compress}
PACKED = gzip.compress(b"x")
INFER = "/v2/models/tiny/infer"
MANY = np.tile(rows_for(0, 1, 2), (40, 1))
MIB = 2**20


def expanded(body: bytes, coding: Coding, most: int) -> bytes:
    return at_once(expand(body, coding, most))


def packed(content: bytes, coding: Coding, headers: list[tuple[bytes, bytes]]) -> bytes:
    return at_once(compressed(content, coding, headers))


@pytest.mark.parametrize("name", PACK)
def test_a_body_is_expanded_up_to_its_limit(name: str) -> None:
    coding = CODINGS[name.encode()]
    body = PACK[name](b"x" * 1000)
    assert expanded(body, coding, 1000) == b"x" * 1000
    with pytest.raises(BodyGrowsTooLarge, match="larger than 999 bytes"):
        expanded(body, coding, 999)
    assert expanded(PACK[name](b""), coding, 10) == b""


def test_a_bomb_is_given_up_early() -> None:
    bomb = gzip.compress(bytes(40 * MIB), 1)
    tracemalloc.start()
    with pytest.raises(BodyGrowsTooLarge):
        expanded(bomb, GZIP, MIB)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * MIB


@pytest.mark.parametrize(
    "body",
    [b"", b"plain", PACKED[:-1], PACKED + b"y", zlib.compress(b"x")],
    ids=["empty", "plain", "cut off", "with more behind it", "deflate"],
)
def test_what_is_not_gzip_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedBody):
        expanded(body, GZIP, 100)


def test_how_large_a_body_may_get_is_known_before_it_is_expanded() -> None:
    limits = Limits(max_body_bytes=8 * MIB, max_expansion=100)
    zeros = bytes(8 * MIB)
    with pytest.raises(BodyGrowsTooLarge, match="compressed bytes may hold"):
        expanded_bytes(gzip.compress(zeros), GZIP, limits)  # a thousandth of its size
    assert expanded_bytes(gzip.compress(zeros[:MIB]), GZIP, limits) == MIB
    assert expanded_bytes(zlib.compress(zeros), DEFLATE, limits) == MIB  # it does not say
    noise = np.random.default_rng(0).bytes(4 * MIB)
    assert expanded_bytes(gzip.compress(noise, 1), GZIP, limits) == len(noise)
    assert expanded_bytes(zlib.compress(noise, 1), DEFLATE, limits) == limits.max_body_bytes


def test_a_body_is_held_to_the_size_that_it_says() -> None:
    lie = gzip.compress(bytes(4 * MIB))[:-4] + (100).to_bytes(4, "little")
    said = expanded_bytes(lie, GZIP, Limits())
    assert said == 100
    with pytest.raises(BodyGrowsTooLarge):
        expanded(lie, GZIP, said)


@pytest.mark.parametrize("name", PACK)
@pytest.mark.parametrize("size", [0, 1, 32_767, 32_768, 32_769, 300_000])
def test_pieces_together_are_the_whole(name: str, size: int) -> None:
    coding = CODINGS[name.encode()]
    for content in (bytes(size), np.random.default_rng(0).bytes(size)):
        body = PACK[name](content)
        assert expanded(body, coding, size) == content
        at_most = expand_at_once(body, coding, 70_000)
        assert at_most == (content if size <= 70_000 and len(body) <= 70_000 else None)


def test_the_coding_of_a_body() -> None:
    assert of_body(b"GZip") is GZIP
    assert of_body(b" deflate ") is DEFLATE
    assert of_body(b"identity") is None
    for unknown in (b"br", b"gzip,gzip", b"", b"*"):
        with pytest.raises(UnsupportedMediaType):
            of_body(unknown)


def test_only_one_coding_alone_is_a_wish() -> None:
    assert for_answer(b"gzip") is GZIP
    assert for_answer(b"Deflate;q=0.5") is DEFLATE
    for none in (b"gzip, deflate", b"*", b"identity", b"gzip;q=0", b"gzip; q=0.00", b"br", b""):
        assert for_answer(none) is None


def test_an_answer_is_compressed_if_that_is_worth_it() -> None:
    for content in (b"x" * 100, np.random.default_rng(0).bytes(2000), b"x" * 2 * MIB):
        headers: list[tuple[bytes, bytes]] = []
        assert packed(content, GZIP, headers) == content
        assert headers == []
    headers = []
    assert gzip.decompress(packed(b"x" * 2000, GZIP, headers)) == b"x" * 2000
    assert (b"content-encoding", b"gzip") in headers
    assert (b"vary", b"accept-encoding") in headers


# --- a real server ---------------------------------------------------------------------------


def body_for(path: str) -> bytes:
    rows = MANY.tolist()
    if path == "/topk":
        return orjson.dumps({"inputs": rows})
    tensor = {"name": "hidden", "shape": list(MANY.shape), "datatype": "FP32", "data": rows}
    return orjson.dumps({"inputs": [tensor]})


@pytest.mark.parametrize("path", [INFER, "/topk"])
@pytest.mark.parametrize("name", PACK)
def test_bodies_and_answers_may_be_compressed(http: httpx.Client, path: str, name: str) -> None:
    body = body_for(path)
    json = {"content-type": "application/json"}
    plain = http.post(path, content=body, headers=json)
    assert plain.status_code == 200
    assert "content-encoding" not in plain.headers
    headers = {**json, "content-encoding": name, "accept-encoding": name}
    for _ in range(2):  # and when its head is known
        with http.stream("POST", path, content=PACK[name](body), headers=headers) as answer:
            packed = b"".join(answer.iter_raw())
        assert answer.headers["content-encoding"] == name
        assert int(answer.headers["content-length"]) == len(packed) < len(plain.content)
        assert zlib.decompress(packed, 47) == plain.content


@pytest.mark.parametrize("path", [INFER, "/topk"])
def test_what_libraries_send_by_themselves_is_no_wish(http: httpx.Client, path: str) -> None:
    headers = {"content-type": "application/json", "accept-encoding": "gzip, deflate, br"}
    answer = http.post(path, content=body_for(path), headers=headers)
    assert len(answer.content) > compression.WORTHWHILE
    assert "content-encoding" not in answer.headers


@pytest.mark.parametrize("path", [INFER, "/topk"])
def test_bad_compressed_bodies_are_refused_and_the_service_goes_on(
    http: httpx.Client, path: str
) -> None:
    body = body_for(path)
    bomb = gzip.compress(bytes(40 * MIB))
    assert len(bomb) < MIB
    bad = [
        (413, "gzip", bomb),
        (400, "gzip", body),
        (400, "gzip", gzip.compress(body)[:-9]),
        (400, "deflate", gzip.compress(body)),
        (415, "br", body),
        (415, "gzip, gzip", gzip.compress(gzip.compress(body))),
    ]
    for status, name, content in bad:
        headers = {"content-type": "application/json", "content-encoding": name}
        assert http.post(path, content=content, headers=headers).status_code == status
    headers = {"content-type": "application/json", "content-encoding": "identity"}
    assert http.post(path, content=body, headers=headers).status_code == 200


def test_a_compressed_tensor_lies_where_the_json_part_ended(http: httpx.Client) -> None:
    """The length is that of the JSON part before it was compressed, in and out."""
    head = (
        b'{"inputs":[{"name":"hidden","shape":[120,%d],"datatype":"FP32","parameters":'
        b'{"binary_data_size":%d}}],"parameters":{"binary_data_output":true}}'
        % (WIDTH, MANY.nbytes)
    )
    length = "inference-header-content-length"
    plain = http.post(INFER, content=head + MANY.tobytes(), headers={length: str(len(head))})
    packed = http.post(
        INFER,
        content=gzip.compress(head + MANY.tobytes()),
        headers={length: str(len(head)), "content-encoding": "gzip", "accept-encoding": "gzip"},
    )
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == plain.content  # httpx has decompressed it
    assert packed.headers[length] == plain.headers[length]
