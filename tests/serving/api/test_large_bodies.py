"""Large bodies and answers: in pieces the same as at once; refused before they are worked on."""

import tracemalloc
from collections.abc import Callable
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import orjson
import pytest
from helpers.npy_bytes import npy_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from service.errors import DSSError
from service.http import codecs, json_rows, large_answers, large_bodies
from service.http.codecs import Bounds
from service.http.inference import v2, v2_outputs
from service.http.inference.v2_outputs import Output, Outputs
from service.http.pieces import Pieces, at_once
from service.repository.model import Source
from service.topk import NO_CLASS, RUNGS, SPARSE, Mode, TopK

T = TypeVar("T")

WIDTH = 5
BOUNDS = Bounds(4096, WIDTH)
ROWS = np.random.default_rng(0).normal(size=(3000, WIDTH)).astype(np.float32)
MIB = 2**20


def counted(pieces: Pieces[Any]) -> int:
    """How many pieces a body is decoded in, whatever comes of it."""
    number = 0
    try:
        while True:
            next(pieces)
            number += 1
    except (StopIteration, DSSError):
        return number


# --- bodies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [0, orjson.OPT_INDENT_2], ids=["dense", "indented"])
@pytest.mark.parametrize("order", [("k", "inputs", "experts"), ("inputs", "experts", "k")])
def test_json_in_pieces_is_the_same_as_at_once(indent: int, order: tuple[str, ...]) -> None:
    fields = {"inputs": ROWS.tolist(), "k": 3, "experts": 2}
    body = orjson.dumps({name: fields[name] for name in order}, option=indent)
    decoded = at_once(large_bodies.decode_json(body, b"", BOUNDS))
    expected = codecs.decode_json(body, b"", BOUNDS)
    assert np.array_equal(decoded.hidden, ROWS) and np.array_equal(expected.hidden, ROWS)
    assert decoded[1:] == expected[1:] == (3, 2, SPARSE)
    assert counted(large_bodies.decode_json(body, b"", BOUNDS)) > 5


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({}, None),
        ({"exact": True}, Mode(exact=True)),
        ({"recall": 0.99}, Mode(recall=0.99)),
        ({"rescore": True}, Mode(rescore=True)),
        ({"exact": False}, SPARSE),
    ],
)
def test_modes_are_read_in_pieces_too(fields: dict[str, Any], mode: Mode | None) -> None:
    body = orjson.dumps({"inputs": ROWS.tolist(), **fields})
    query = "&".join(f"{name}={orjson.dumps(value).decode()}" for name, value in fields.items())
    for decoded in (
        at_once(large_bodies.decode_json(body, b"", BOUNDS)),
        at_once(large_bodies.decode_npy(npy_bytes(ROWS), query.encode(), BOUNDS)),
    ):
        assert decoded.mode == mode and np.array_equal(decoded.hidden, ROWS)


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f4"])
def test_npy_in_pieces_is_the_same_as_at_once(dtype: str) -> None:
    rows = np.tile(ROWS, (1, 20)).astype(dtype)
    decoded = at_once(large_bodies.decode_npy(npy_bytes(rows), b"k=3", Bounds(4096, 100)))
    assert np.array_equal(decoded.hidden, codecs.decode_npy(npy_bytes(rows), b"k=3").hidden)


def infer_body(data: object, shape: tuple[int, int] = ROWS.shape) -> bytes:
    tensor = {"name": "hidden", "shape": shape, "datatype": "FP32", "data": data}
    document = {"id": "a", "inputs": [tensor], "outputs": [{"name": "classes"}]}
    return orjson.dumps(document | {"parameters": {"k": 3}})


@pytest.mark.parametrize("data", [ROWS.tolist(), ROWS.ravel().tolist()], ids=["rows", "flat"])
def test_v2_json_in_pieces_is_the_same_as_at_once(data: list[Any]) -> None:
    body = infer_body(data)
    request, hidden = at_once(v2.decode_large(body, None, BOUNDS))
    expected, _ = v2.decode(body, None, BOUNDS)
    assert np.array_equal(hidden, ROWS)
    assert request._replace(data=None) == expected._replace(data=None)
    assert counted(v2.decode_large(body, None, BOUNDS)) > 5


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64"])
def test_v2_tensors_in_pieces_are_the_same_as_at_once(datatype: str) -> None:
    rows = ROWS.astype(v2.INPUT_DTYPES[datatype])
    tensor = {"name": "hidden", "shape": rows.shape, "datatype": datatype}
    tensor["parameters"] = {"binary_data_size": rows.nbytes}
    head = orjson.dumps({"inputs": [tensor]})
    length = str(len(head)).encode()
    body = head + rows.tobytes()
    _, hidden = at_once(v2.decode_large(body, length, BOUNDS))
    assert np.array_equal(hidden, v2.decode(body, length, BOUNDS)[1])


LONG_LIST = b",".join([b"[1,2,3,4,5]"] * 8000)
WRONG: dict[str, tuple[bytes, str]] = {
    "no rows": (b'{"inputs":[' + b" " * 100_000 + b"]}", "WrongWidth"),
    "empty rows": (b'{"inputs":[' + b"[]," * 100_000 + b"[]]}", "TooManyRows"),
    "many rows": (b'{"inputs":[' + LONG_LIST + b"]}", "TooManyRows"),
    "one long row": (b'{"inputs":[[' + b"1," * 100_000 + b"1]]}", "WrongWidth"),
    "wide rows": (b'{"inputs":[' + b"[1,2,3,4,5,6]," * 4000 + b"[1]]}", "WrongWidth"),
    "ragged": (b'{"inputs":[' + b"[1,2,3,4,5]," * 4000 + b"[1]]}", "RaggedRows"),
    "nested": (b'{"inputs":[' + b"[[1,2,3,4,5]]," * 4000 + b"[1]]}", "DSSError"),
    "a boolean": (b'{"inputs":[' + b"[1,2,3,4,5]," * 4000 + b"[1,2,3,4,true]]}", "NotANumber"),
    "a string": (b'{"inputs":[' + b"[1,2,3,4,5]," * 4000 + b'[1,2,3,4,"]"]]}', "DSSError"),
    "infinite": (b'{"inputs":[' + b"[1,2,3,4,5]," * 4000 + b"[1,2,3,4,1e999]]}", "NotFinite"),
    "no comma": (b'{"inputs":[' + b"[1,2,3,4,5] " * 4000 + b"[1,2,3,4,5]]}", "MalformedBody"),
    "a comma too many": (b'{"inputs":[' + b"[1,2,3,4,5]," * 4000 + b"]}", "MalformedBody"),
    "no end": (b'{"inputs":[' + b"[1,2,3,4,5]," * 8000, "DSSError"),
    "brackets only": (b"[" * 100_000, "MalformedBody"),
    "spaces before": (b" " * 100_000 + b'{"inputs":[[1,2,3,4,5]]}', "MalformedBody"),
    "many fields": (b'{"inputs":[[1,2,3,4,5]],' + b'"a":1,' * 20_000 + b'"k":1}', "MalformedBody"),
    "two lists": (b'{"inputs":[' + b"[1,2,3,4,5]," * 4000 + b'[1,2,3,4,5]],"k":[1]}', "DSSError"),
    "another list": (b'{"k":[' + b"[1,2,3,4,5]," * 4000 + b"[1,2,3,4,5]]}", "MissingField"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(name: str) -> None:
    body, error = WRONG[name]
    with pytest.raises(DSSError) as raised:
        at_once(large_bodies.decode_json(body, b"", BOUNDS))
    assert error in ("DSSError", type(raised.value).__name__), raised.value
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("name", ["empty rows", "one long row", "many rows", "brackets only"])
def test_a_bomb_costs_a_few_pieces_and_little_memory(name: str) -> None:
    body, _ = WRONG[name]
    body = body[:11] + body[11:-2] * (8 * MIB // len(body)) + body[-2:]
    tracemalloc.start()
    pieces = counted(large_bodies.decode_json(body, b"", BOUNDS))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pieces <= 4096 * 12 // 32_768 + 1
    assert peak < 4 * MIB


@pytest.mark.parametrize(
    "shape", [(3000, 6), (5000, 5), (2999, 5), (10**9, 5)], ids=["wide", "many", "few", "billion"]
)
def test_v2_shapes_are_checked_before_the_numbers(shape: tuple[int, int]) -> None:
    with pytest.raises(DSSError):
        at_once(v2.decode_large(infer_body(ROWS.ravel().tolist(), shape), None, BOUNDS))


def test_small_bodies_are_checked_before_they_are_packed() -> None:
    with pytest.raises(codecs.TooManyRows):
        codecs.decode_json(b'{"inputs":[' + b"[]," * 5000 + b"[]]}", b"", BOUNDS)


# --- answers ---------------------------------------------------------------------------------


def answer(rows: int, k: int, *, with_rungs: bool = False) -> TopK:
    rng = np.random.default_rng(1)
    classes = rng.integers(0, 50, (rows, k))
    classes[0, -1] = NO_CLASS
    return TopK(
        classes,
        np.where(classes < 0, -np.inf, rng.normal(size=(rows, k))).astype(np.float32),
        rng.integers(0, 4, rows),
        rng.random(rows).astype(np.float32),
        0.0,
        np.zeros(4, np.int64),
        np.zeros(4),
        rng.integers(0, 4, rows) if with_rungs else None,
        rng.integers(0, len(RUNGS), rows).astype(np.uint8) if with_rungs else None,
    )


LABELS: NDArray[np.object_] = np.array([f'"{i}"é' for i in range(50)], dtype=object)


@pytest.mark.parametrize(("rows", "k"), [(1, 5000), (7000, 7), (4096, 3), (3, 4096)])
@pytest.mark.parametrize("labels", [None, LABELS], ids=["ids", "labels"])
@pytest.mark.parametrize("promise", [None, "withdrawn"])
def test_an_answer_in_pieces_has_the_same_bytes(
    rows: int, k: int, labels: NDArray[np.object_] | None, promise: str | None
) -> None:
    source = Source("a", 1, labels, 0 if labels is None else 9)
    given = answer(rows, k, with_rungs=promise is not None)
    for media_type, encode in large_answers.ENCODERS.items():
        asked = (source, given, promise)
        assert b"".join(at_once(encode(*asked))) == codecs.ENCODERS[media_type](*asked)
        assert rows == 1 or counted(encode(*asked)) > 1


OUTPUTS: list[Callable[[str], bool]] = [lambda _: False, lambda _: True, lambda n: n == "gates"]


@pytest.mark.parametrize("is_binary", OUTPUTS, ids=["json", "binary", "mixed"])
def test_a_v2_answer_in_pieces_has_the_same_bytes(is_binary: Callable[[str], bool]) -> None:
    named = tuple(Output(name, is_binary(name)) for name in v2_outputs.DATATYPES)
    further = tuple(Output(name, is_binary(name)) for name in v2_outputs.MODE_DATATYPES)
    outputs = Outputs(named, further, all(output.binary for output in named))
    model: Any = Source("a", 1, None)
    object.__setattr__(model, "name", "a")
    given = answer(700, 7, with_rungs=True)
    asked = (model, outputs, "an id", given, "kept")
    parts, json_length = at_once(v2_outputs.encode_large(*asked))
    assert (b"".join(parts), json_length) == v2_outputs.encode(*asked)


# --- both ways agree ---------------------------------------------------------------------------


def outcome(decode: Callable[[], T]) -> T | None:
    """What a body asks for; None if it is refused."""
    try:
        return decode()
    except DSSError:
        return None


def spaced(draw: st.DrawFn, body: bytes) -> bytes:
    """With white space anywhere, and perhaps altered in a place or two."""
    space = st.sampled_from([b"", b"", b"", b" ", b"\n\t "])
    body = b"".join(bytes([byte]) + draw(space) for byte in body)
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(body) - 1))
        byte = bytes([draw(st.sampled_from(b'[]{},:"1e-.tx '))])
        body = body[:place] + byte + body[place + draw(st.integers(0, 1)) :]
    return body


SOME_ROWS = st.lists(st.lists(st.integers(-9, 9), min_size=2, max_size=2), max_size=6)


@st.composite
def native_bodies(draw: st.DrawFn) -> bytes:
    return spaced(draw, orjson.dumps({"inputs": draw(SOME_ROWS), "k": 3}))


@st.composite
def infer_bodies(draw: st.DrawFn) -> bytes:
    rows = draw(SOME_ROWS)
    flat = [number for row in rows for number in row]
    return spaced(draw, infer_body(draw(st.sampled_from([rows, flat])), (len(rows), 2)))


@settings(max_examples=300, deadline=None)
@given(native_bodies())
def test_whatever_the_body_both_ways_agree(body: bytes) -> None:
    bounds = Bounds(4, 2)
    with patch.object(json_rows, "PIECE_BYTES", 8):
        large = outcome(lambda: at_once(large_bodies.decode_json(body, b"", bounds)))
    small = outcome(lambda: codecs.decode_json(body, b"", bounds))
    assert (large is None) == (small is None), body
    if large is not None and small is not None:
        assert np.array_equal(large.hidden, small.hidden) and large[1:] == small[1:]


@settings(max_examples=300, deadline=None)
@given(infer_bodies())
def test_whatever_the_v2_body_what_both_ways_take_is_the_same(body: bytes) -> None:
    """In pieces a body may be refused for what is in other lists than its data; never taken."""
    bounds = Bounds(4, 2)
    with patch.object(json_rows, "PIECE_BYTES", 8):
        large = outcome(lambda: at_once(v2.decode_large(body, None, bounds)))
    small = outcome(lambda: v2.decode(body, None, bounds))
    assert small is not None or large is None, body
    if large is not None and small is not None:
        assert np.array_equal(large[1], small[1])
        assert large[0]._replace(data=None) == small[0]._replace(data=None)
