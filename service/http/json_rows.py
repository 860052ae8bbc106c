"""Rows of numbers in large JSON bodies, parsed a piece at a time.

The list of numbers is cut out of the body, which leaves a short document; the list itself is parsed
a few rows at a time. So the work can be done in pieces, a number never takes more memory than four
bytes for long, and what is wrong is refused before the rest of it is looked at.

B rows, D hidden.
"""

import re
from collections.abc import Generator
from typing import NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from service.errors import EmptyBatch, WrongWidth
from service.http import codecs
from service.http.codecs import Bounds, MalformedBody
from service.http.fields import InvalidField
from service.http.pieces import PIECE_BYTES

MOST_BESIDE_BYTES = 65_536  # of a body, besides its numbers
NUMBER_BYTES = 64  # that a number may take, with the white space around it
SEPARATOR_BYTES = 1024  # between two rows
COMMA = re.compile(rb"[ \t\r\n]*,")
NESTED = re.compile(rb"\[[ \t\r\n]*\[")
TWO_ENDS = re.compile(rb"\][ \t\r\n]*\]")

Parsed = Generator[None, None, NDArray[np.float32]]


class CutBody(NamedTuple):
    """A body without its list of numbers, and where that was."""

    document: bytes  # with [] in its place
    begin: int  # what is between the brackets
    end: int


def cut_inputs(body: bytes) -> CutBody:
    """A native body: 'inputs' is the only list in it."""
    begin, end = body.find(b"["), body.rfind(b"]")
    if not 0 <= begin < end:
        begin = end = len(body)
    return _cut(body, begin, end)


def cut_data(body: bytes) -> Generator[None, None, CutBody]:
    """The JSON part of the Open Inference Protocol: one input has 'data', flat or as rows."""
    begin = body.find(b"[", max(0, body.find(b'"data"')))
    if begin < 0:
        return _cut(body, len(body), len(body))
    if NESTED.match(body, begin, begin + SEPARATOR_BYTES) is None:
        return _cut(body, begin, body.find(b"]", begin))
    for at in range(begin, len(body), PIECE_BYTES):
        ends = TWO_ENDS.search(body, at, at + PIECE_BYTES + SEPARATOR_BYTES)
        if ends is not None:
            return _cut(body, begin, ends.end() - 1)
        yield
    return _cut(body, begin, -1)


def _cut(body: bytes, begin: int, end: int) -> CutBody:
    if end < 0:
        raise MalformedBody("The body is not valid JSON: its list of numbers has no end.")
    if begin + len(body) - end > MOST_BESIDE_BYTES:
        raise MalformedBody(
            f"Besides its numbers the body has more than {MOST_BESIDE_BYTES} bytes;"
            " it may be that its lists are not closed."
        )
    return CutBody(body[:begin] + b"[]" + body[end + 1 :], begin + 1, end)


def parse_rows(body: bytes, begin: int, end: int, bounds: Bounds) -> Parsed:
    """`[1,2],[3,4]` between two places of a body, as [B,D]."""
    parsed: list[NDArray[np.float32]] = []
    found, at = 0, begin
    row_bytes = NUMBER_BYTES * (bounds.width or 0) + SEPARATOR_BYTES
    while at < end:
        piece, at = _piece_of_rows(body, at, end, row_bytes)
        bounds.check_lists(piece, found)
        rows = _parse(piece, f"behind row {found}")
        if not rows:
            break
        bounds.check_rows(found + len(rows))
        _check_width(rows[0], bounds)
        suspicious = b"u" in piece or b"l" in piece  # true, false or null
        parsed.append(codecs.rows(rows, suspicious, bounds, first=found))
        found += len(rows)
        yield
    if not parsed:
        raise EmptyBatch("'inputs' holds no row.")
    return np.concatenate(parsed)


def _check_width(row: object, bounds: Bounds) -> None:
    """Of the first row of a piece: how many rows there are is not known yet."""
    if isinstance(row, list) and len(row) != bounds.width:
        raise WrongWidth(f"A row has {len(row)} numbers; this model's rows have {bounds.width}.")


def _piece_of_rows(body: bytes, at: int, end: int, row_bytes: int) -> tuple[bytes, int]:
    """Whole rows, and where the next one begins."""
    cut = body.find(b"]", at + PIECE_BYTES, min(end, at + PIECE_BYTES + row_bytes))
    if cut < 0:
        if end - at > PIECE_BYTES + row_bytes:
            raise WrongWidth("A row of 'inputs' is much longer than the model's rows can be.")
        return body[at:end], end
    comma = COMMA.match(body, cut + 1, min(end, cut + 1 + SEPARATOR_BYTES))
    if comma is None:
        if end - cut > SEPARATOR_BYTES or body[cut + 1 : end].strip(b" \t\r\n"):
            raise MalformedBody("The body is not valid JSON: a comma is missing behind a row.")
        return body[at : cut + 1], end
    if comma.end() == end:
        raise MalformedBody("The body is not valid JSON: a comma follows the last row.")
    return body[at : cut + 1], comma.end()


def parse_flat(body: bytes, begin: int, end: int, shape: tuple[int, int]) -> Parsed:
    """`1,2,3,4` between two places of a body, as [B,D]."""
    numbers = shape[0] * shape[1]
    parsed: list[NDArray[np.float32]] = []
    found, at = 0, begin
    while at < end:
        cut = body.find(b",", at + PIECE_BYTES, min(end, at + PIECE_BYTES + NUMBER_BYTES))
        if cut < 0 and end - at > PIECE_BYTES + NUMBER_BYTES:
            raise MalformedBody("A number in 'data' is much longer than numbers are.")
        if cut == end - 1:
            raise MalformedBody("The body is not valid JSON: a comma follows the last number.")
        piece = _parse(body[at : end if cut < 0 else cut], f"behind number {found}")
        at = end if cut < 0 else cut + 1
        found += len(piece)
        if found > numbers:
            break
        parsed.append(codecs.rows([piece], True)[0])
        yield
    if found != numbers:
        raise InvalidField(f"'data' has {found} numbers or more; its shape says {numbers}.")
    return np.concatenate(parsed).reshape(shape)


def _parse(piece: bytes, where: str) -> list[object]:
    try:
        parsed: list[object] = orjson.loads(b"[" + piece + b"]")
    except orjson.JSONDecodeError as error:
        raise codecs.not_json(error, where) from error
    return parsed
