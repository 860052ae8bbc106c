"""Inference in the Open Inference Protocol, version 2, with Triton's binary tensors.

One input, `hidden`; k, experts and the mode are parameters of the request. The outputs are classes,
log_probs, experts and gates (`v2_outputs.py`). What else the protocol has is in `service/http/v2/`.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.errors import EmptyBatch, WrongWidth
from service.http import codecs, compression, fields, json_rows, large_bodies
from service.http.codecs import UNBOUNDED, Bounds, MalformedBody
from service.http.compression import Coding
from service.http.fields import InvalidField, MissingField, UnknownField
from service.http.inference import v2_outputs
from service.http.inference.handler import Asked, Header, InferenceHandler, Target
from service.http.inference.v2_outputs import Outputs, parameters_of, refuse_shared_memory
from service.http.large_answers import Parts
from service.http.pieces import Pieces, at_once
from service.topk import SPARSE, Answered

INPUT = "hidden"
INPUT_DTYPES: Mapping[str, np.dtype[np.floating[Any]]] = {
    "FP32": np.dtype(np.float32),
    "FP16": np.dtype(np.float16),
    "FP64": np.dtype(np.float64),
}
BINARY_BYTES = 12  # of a class and its log-probability
JSON_HEADER = (b"content-type", b"application/json")
BINARY_HEADER = (b"content-type", b"application/octet-stream")
SHORT = 1024  # of a head whose meaning is worth keeping


class InferRequest(NamedTuple):
    """What the JSON part of a request says."""

    shape: tuple[int, int]
    dtype: np.dtype[np.floating[Any]]
    data: list[Any] | None  # None: the tensor follows the JSON part
    options: fields.Options
    outputs: Outputs
    id: str | None
    seconds: float | None  # how long the client will wait


class InferHead(NamedTuple):
    json_length: bytes | None  # where the JSON part ends, if a tensor follows it
    body_coding: Coding | None
    answer_coding: Coding | None


class V2Handler(InferenceHandler[InferHead]):
    """The Open Inference Protocol's part in answering a request."""

    def read_head(self, headers: Iterable[Header], query_string: bytes) -> InferHead:
        del query_string
        json_length = content_encoding = accept_encoding = None
        for name, value in headers:
            if name == b"inference-header-content-length":
                json_length = json_length or value
            elif name == b"content-encoding":
                content_encoding = codecs.joined(content_encoding, value)
            elif name == b"accept-encoding":
                accept_encoding = codecs.joined(accept_encoding, value)
        return InferHead(
            json_length,
            compression.of_body(content_encoding),
            compression.for_answer(accept_encoding),
        )

    def body_coding(self, head: InferHead) -> Coding | None:
        return head.body_coding

    def is_quick(self, head: InferHead, body: bytes) -> bool:
        del head, body
        return False  # what the numbers are is known only when the JSON part is read

    def read_body(self, head: InferHead, body: bytes, bounds: Bounds) -> Asked:
        request, hidden = decode(body, head.json_length, bounds)
        return _asked(request, hidden)

    def read_large_body(self, head: InferHead, body: bytes, bounds: Bounds) -> Pieces[Asked]:
        request, hidden = yield from decode_large(body, head.json_length, bounds)
        return _asked(request, hidden)

    def settle_mode(self, asked: Asked, target: Target) -> Asked:
        asked = super().settle_mode(asked, target)
        if (asked.mode or SPARSE) is SPARSE:
            asked.request.outputs.check_plain()
        return asked

    def answer_bytes(self, head: InferHead, asked: Asked, target: Target) -> int:
        del head
        return BINARY_BYTES if asked.request.outputs.binary else target.json_bytes

    def encode(
        self, head: InferHead, asked: Asked, target: Target, answer: Answered
    ) -> tuple[list[Header], bytes]:
        request = asked.request
        content, json_length = v2_outputs.encode(
            target.model, request.outputs, request.id, answer, asked.promise
        )
        headers, (content,) = at_once(_with_headers(head, [content], json_length))
        return headers, content

    def encode_large(
        self, head: InferHead, asked: Asked, target: Target, answer: Answered
    ) -> Pieces[tuple[list[Header], Parts]]:
        request = asked.request
        parts, json_length = yield from v2_outputs.encode_large(
            target.model, request.outputs, request.id, answer, asked.promise
        )
        return (yield from _with_headers(head, parts, json_length))


def _asked(request: "InferRequest", hidden: NDArray[np.float32]) -> Asked:
    media_type = codecs.NPY if request.data is None else codecs.JSON
    return Asked(hidden, *request.options, media_type, request, request.seconds)


def _with_headers(
    head: InferHead, parts: Parts, json_length: int
) -> Pieces[tuple[list[Header], Parts]]:
    headers: list[Header] = []
    if json_length == sum(map(len, parts)):
        headers.append(JSON_HEADER)
    else:
        headers += [BINARY_HEADER, (b"inference-header-content-length", b"%d" % json_length)]
    parts = yield from compression.compressed_parts(parts, head.answer_coding, headers)
    headers.append((b"content-length", b"%d" % sum(map(len, parts))))
    return headers, parts


# --- requests --------------------------------------------------------------------------------


def decode(
    body: bytes, json_length: bytes | None, bounds: Bounds = UNBOUNDED
) -> tuple[InferRequest, NDArray[np.float32]]:
    """A request and its rows, [B,D]; `json_length` says where the JSON part ends."""
    head = _json_part(body, json_length)
    if len(head) > codecs.SHORT_BODY:
        bounds.check_lists(head)
    tail = len(body) - len(head)
    request = _read_short(head, tail) if len(head) <= SHORT else _read(head, tail)
    bounds.check(*request.shape)
    if request.data is not None:
        return request, _rows(request.data, request.shape)
    # The JSON part may be of any length, so that the tensor may lie at an odd address.
    return request, codecs.float32(np.ndarray(request.shape, request.dtype, body, len(head)))


def decode_large(
    body: bytes, json_length: bytes | None, bounds: Bounds
) -> Pieces[tuple[InferRequest, NDArray[np.float32]]]:
    """The same in pieces: the JSON part is read without its numbers, then those."""
    head = _json_part(body, json_length)
    if len(head) < len(body):
        if len(head) > json_rows.MOST_BESIDE_BYTES:
            raise MalformedBody("The JSON part is too long for one that a tensor follows.")
        bounds.check_lists(head)
        request = _read(head, len(body) - len(head))
        bounds.check(*request.shape)
        values = np.ndarray(request.shape, request.dtype, body, len(head))
        return request, (yield from large_bodies.float32(values))
    cut = yield from json_rows.cut_data(head)
    bounds.check_lists(cut.document)
    request = _read(cut.document, 0)
    bounds.check(*request.shape)
    if json_rows.NESTED.match(head, cut.begin - 1, cut.end):
        hidden = yield from json_rows.parse_rows(head, cut.begin, cut.end, bounds)
    else:
        hidden = yield from json_rows.parse_flat(head, cut.begin, cut.end, request.shape)
    return request, _shaped(hidden, request.shape)


def _json_part(body: bytes, json_length: bytes | None) -> bytes:
    if json_length is None:
        return body
    end = int(json_length) if json_length.isdigit() and len(json_length) < 12 else 0
    if not 0 < end <= len(body):
        raise MalformedBody("Inference-Header-Content-Length must be the length of the JSON.")
    return body[:end]


def _read(head: bytes, tail: int) -> InferRequest:
    """The JSON part of a request that `tail` bytes follow."""
    document = codecs.parse_json(head)
    if not isinstance(document, dict):
        raise InvalidField("The JSON part must be an object with the field 'inputs'.")
    tensor = _only_input(document)
    shape = tensor.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or any(type(n) is not int for n in shape):
        raise InvalidField(f"The shape of {INPUT!r} must be [rows, width].")
    rows, width = shape
    if rows < 1:
        raise EmptyBatch(f"{INPUT!r} holds no row.")
    if width < 1:
        raise WrongWidth(f"The rows of {INPUT!r} are empty.")
    datatype = tensor["datatype"]
    dtype = INPUT_DTYPES[datatype]
    size = parameters_of(tensor).get("binary_data_size")
    if size is None:
        if tail:
            raise MalformedBody(f"{tail} bytes follow the JSON part, which no input announces.")
        if not isinstance(tensor.get("data"), list):
            raise MissingField(f"The field 'data' of {INPUT!r} is missing.")
        if datatype == "FP16":
            raise InvalidField("An FP16 tensor cannot be JSON: it must follow the JSON part.")
    elif size != tail or tail != rows * width * dtype.itemsize:
        raise MalformedBody(
            f"{INPUT!r} has {rows} x {width} values of {dtype.itemsize} bytes and announces"
            f" {size!s:.20} bytes; {tail} follow the JSON part."
        )
    parameters = parameters_of(document)
    name = document.get("id")
    if name is not None and not isinstance(name, str):
        raise InvalidField("'id' must be a string.")
    if parameters.get("k") is None:
        parameters = {key: value for key, value in parameters.items() if key != "k"}
    return InferRequest(
        (rows, width),
        dtype,
        None if size is not None else tensor["data"],
        fields.of_object(parameters),
        v2_outputs.read(document, bool(parameters.get("binary_data_output", False))),
        name,
        _seconds(parameters),
    )


# Clients with binary tensors send the same few JSON parts again and again.
_read_short = lru_cache(maxsize=256)(_read)


def _only_input(document: dict[str, Any]) -> dict[str, Any]:
    inputs = document.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise InvalidField(f"'inputs' must be a list of one tensor, {INPUT!r}.")
    tensor: dict[str, Any] = inputs[0]
    if tensor.get("name") != INPUT:
        raise UnknownField(f"There is one input, {INPUT!r}.")
    if tensor.get("datatype") not in tuple(INPUT_DTYPES):
        raise InvalidField(f"The datatype of {INPUT!r} must be FP32, FP16 or FP64.")
    refuse_shared_memory(parameters_of(tensor))
    return tensor


def _seconds(parameters: dict[str, Any]) -> float | None:
    """Triton's `timeout`, in microseconds; 0 is none."""
    microseconds = fields.count("timeout", parameters.get("timeout", 0))
    if microseconds < 0:
        raise InvalidField("'timeout' must be a number of microseconds, not negative.")
    return microseconds / 1e6 or None


def _rows(data: list[Any], shape: tuple[int, int]) -> NDArray[np.float32]:
    """JSON data of [B,D], flat or as rows."""
    rows, width = shape
    if data and not isinstance(data[0], list):
        if len(data) != rows * width:
            raise InvalidField(f"'data' has {len(data)} numbers; its shape says {rows * width}.")
        data = [data[start : start + width] for start in range(0, len(data), width)]
    return _shaped(codecs.rows(data, suspicious=True), shape)


def _shaped(hidden: NDArray[np.float32], shape: tuple[int, int]) -> NDArray[np.float32]:
    if hidden.shape != shape:
        raise InvalidField(f"'data' has shape {list(hidden.shape)}, not {list(shape)}.")
    return hidden
