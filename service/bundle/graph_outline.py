"""Reads the outline of an ONNX file before it is parsed.

Parsing makes an object of every part of a file, and an empty part takes two bytes: a file could
unfold to fifty times its size. So its parts are counted first, without making anything of them.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from service.errors import GraphForbidden, GraphMalformed

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # wire types of protobuf
MOST_PARTS = 64  # of one kind; the largest graph of the format has 40 nodes
LARGEST_PART = 4096  # bytes, but for the numbers of an array

# Fields by their numbers in onnx.proto. Others, such as functions, training and sparse arrays, are
# no part of the format.
MODEL: Final = {
    1: "ir_version", 2: "producer_name", 3: "producer_version", 4: "domain", 5: "model_version",
    6: "doc_string", 7: "graph", 8: "opset_import", 14: "metadata_props",
}  # fmt: skip
GRAPH: Final = {1: "node", 2: "name", 5: "initializer", 10: "doc_string", 11: "input", 12: "output"}
INITIALIZER: Final = {
    1: "dims", 2: "data_type", 8: "name", 9: "raw_data", 12: "doc_string", 13: "external_data",
    14: "data_location",
}  # fmt: skip
INNER: Final[Mapping[str, Mapping[int, str]]] = {"graph": GRAPH, "initializer": INITIALIZER}


class Part(NamedTuple):
    field: str
    start: int
    end: int


def check_outline(name: str, content: bytes) -> None:
    """Refuses a file that holds more parts than a graph of the format, or larger ones."""
    _check_message(name, content, Part("model", 0, len(content)), MODEL)


def _check_message(name: str, content: bytes, whole: Part, fields: Mapping[int, str]) -> None:
    counts: dict[str, int] = {}
    for part in _parts(name, content, whole, fields):
        counts[part.field] = counts.get(part.field, 0) + 1
        if counts[part.field] > (1 if part.field == "graph" else MOST_PARTS):
            raise GraphForbidden(f"{name} has more {part.field} parts than the format knows.")
        if part.field in INNER:
            _check_message(name, content, part, INNER[part.field])
        elif part.end - part.start > LARGEST_PART and part.field != "raw_data":
            raise GraphForbidden(
                f"{name} has a {part.field} of {part.end - part.start} bytes; "
                f"{LARGEST_PART} are possible."
            )


def _parts(name: str, content: bytes, whole: Part, fields: Mapping[int, str]) -> Iterator[Part]:
    at = whole.start
    while at < whole.end:
        tag, at = _varint(name, content, at, whole.end)
        number, wire_type = tag >> 3, tag & 7
        start = at
        if wire_type == VARINT:
            _, at = _varint(name, content, at, whole.end)
        elif wire_type == LENGTH:
            length, start = _varint(name, content, at, whole.end)
            at = start + length
        elif wire_type in (FIXED32, FIXED64):
            at += 4 if wire_type == FIXED32 else 8
        else:
            raise _malformed(name)
        if at > whole.end:
            raise _malformed(name)
        if number not in fields:
            raise GraphForbidden(f"{name} has the {whole.field} field {number}, which none may.")
        yield Part(fields[number], start, at)


def _varint(name: str, content: bytes, at: int, end: int) -> tuple[int, int]:
    """A number of 7 bits a byte, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise _malformed(name)


def _malformed(name: str) -> GraphMalformed:
    return GraphMalformed(f"{name} is not a valid ONNX model.")
