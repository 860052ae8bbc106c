"""Body bytes <-> arrays: JSON and .npy in, JSON and .npy out.

Floats never pass through pydantic: orjson makes lists, and lists become one float32 array. What
depends only on a shape or a short text is worked out once and kept.
"""

import re
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from service import npy
from service.errors import DSSError, EmptyBatch, Kind, NotFinite, QueryError, WrongWidth
from service.http import fields
from service.http.fields import InvalidField, MissingField, Options, UnknownField, kind
from service.repository.model import Source
from service.topk import RUNGS, Answered, Mode

JSON = "application/json"
NPY = "application/x-npy"
MEDIA_TYPES = (JSON, NPY)
FIELDS = ("inputs", *fields.NAMES)
FLOAT32 = np.dtype(np.float32)
NOT_FINITE = {JSON: "is too large for float32", NPY: "is a NaN or an infinity"}
SHORT_BODY = 8192  # bytes: is parsed in no time, whatever is in it
OTHER_LISTS = 64  # besides rows, and objects: more than any protocol has
RUNG_NAMES = np.array(RUNGS)


class MalformedBody(DSSError):
    """The body is not what its content type says."""

    kind = Kind.BAD_REQUEST


class UnsupportedMediaType(DSSError):
    kind = Kind.UNSUPPORTED_MEDIA


class NotAcceptable(DSSError):
    """The client accepts no media type that an answer can have."""

    kind = Kind.NOT_ACCEPTABLE


class RaggedRows(QueryError):
    pass


class TooManyRows(DSSError):
    kind = Kind.TOO_LARGE


class NotANumber(QueryError):
    """A string, null, boolean or container stands where a number must."""


class Query(NamedTuple):
    hidden: NDArray[np.float32]  # [B,D]
    k: int | None  # None: as many as is usual for the model
    experts: int
    mode: Mode | None  # None: as is usual for the server


class Bounds(NamedTuple):
    """What is known of a request's rows before they are read."""

    max_rows: int
    width: int | None  # D; None: any

    def check(self, rows: int, width: int) -> None:
        self.check_rows(rows)
        if self.width is not None and width != self.width and width:
            raise WrongWidth(
                f"Inputs have shape [{rows}, {width}]; [rows, {self.width}] is expected."
            )

    def check_rows(self, rows: int) -> None:
        if rows > self.max_rows:
            raise TooManyRows(
                f"The request has {rows} rows or more; at most {self.max_rows} are answered."
            )

    def check_lists(self, text: bytes, found: int = 0) -> None:
        """Refuses JSON that would be parsed into many small things, which takes long; `found` are
        the rows that came before it."""
        if text.count(b"{") > OTHER_LISTS:
            raise InvalidField("The JSON body has objects where numbers must be.")
        lists = text.count(b"[") - OTHER_LISTS
        self.check_rows(found + lists)
        if self.width is not None and lists * 2 * self.width > len(text):
            raise WrongWidth(
                f"Rows of 'inputs' have too few numbers; this model's have {self.width}."
            )


UNBOUNDED = Bounds(2**31, None)

Decoder = Callable[[bytes, bytes, Bounds], Query]  # of a body and a query string
# Of an answer, and whether its promise is kept or withdrawn, if there is one.
Encoder = Callable[[Source, Answered, str | None], bytes]


# --- which codec -----------------------------------------------------------------------------


def request_type(content_type: str | None) -> str:
    """The media type of a body, if it is one that can be read."""
    if content_type in MEDIA_TYPES:
        return content_type
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if media_type not in MEDIA_TYPES:
        raise UnsupportedMediaType(f"The Content-Type must be {JSON} or {NPY}.")
    return media_type


def answer_type(accept: str | None) -> str:
    """The media type an Accept header prefers; JSON if it does not care."""
    if not accept or accept == "*/*":
        return JSON
    if accept in MEDIA_TYPES:
        return accept
    qualities = {media_type: _quality(media_type, accept) for media_type in MEDIA_TYPES}
    best = max(MEDIA_TYPES, key=lambda media_type: qualities[media_type])
    if not qualities[best]:
        raise NotAcceptable(f"An answer can be {JSON} or {NPY}; the Accept header allows neither.")
    return best


def joined(before: bytes | None, value: bytes) -> bytes:
    """A header's value, which may come in parts."""
    return value if before is None else before + b"," + value


def _quality(media_type: str, accept: str) -> float:
    """What an Accept header gives a media type: its most specific range decides."""
    ranges = (media_type, media_type.partition("/")[0] + "/*", "*/*")
    found = {}
    for item in accept.split(","):
        name, *parameters = (part.strip().lower() for part in item.split(";"))
        quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        valid = re.fullmatch(r"0(\.[0-9]{0,3})?|1(\.0{0,3})?", quality)
        found[name] = float(quality) if valid else 0.0
    return next((found[name] for name in ranges if name in found), 0.0)


# --- requests --------------------------------------------------------------------------------


def decode_json(body: bytes, query_string: bytes, bounds: Bounds = UNBOUNDED) -> Query:
    """{"inputs": [[...], ...], "k": 10, "experts": 1}"""
    if len(body) > SHORT_BODY:
        bounds.check_lists(body)
    document = read_document(body, query_string)
    options = fields.of_object(document)
    return Query(rows(document["inputs"], _may_hold_booleans(body), bounds), *options)


def read_document(body: bytes, query_string: bytes) -> dict[str, Any]:
    """A native JSON body; its inputs may be anything."""
    for name, _ in fields.parameters(query_string):
        raise UnknownField(
            f"A JSON body wants an empty query string; it has {fields.quoted(name)}."
        )
    document = parse_json(body)
    if not isinstance(document, dict):
        raise InvalidField("The JSON body must be an object with the field 'inputs'.")
    _check_names(document)
    if "inputs" not in document:
        raise MissingField("The field 'inputs' is missing.")
    return document


def decode_npy(body: bytes, query_string: bytes, bounds: Bounds = UNBOUNDED) -> Query:
    """A .npy body, with k, experts and the mode in the query string."""
    values, options = read_npy(body, query_string, bounds)
    return Query(float32(values), *options)


def read_npy(
    body: bytes, query_string: bytes, bounds: Bounds
) -> tuple[NDArray[np.floating[Any]], Options]:
    """The array as it was sent, and what the query string asks for."""
    options = fields.of_query_string(query_string)
    values = npy.read(body)
    bounds.check(*values.shape)
    return values, options


DECODERS: Mapping[str, Decoder] = {JSON: decode_json, NPY: decode_npy}


def parse_json(body: bytes) -> object:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise not_json(error, f"line {error.lineno}, column {error.colno}") from error


def not_json(error: orjson.JSONDecodeError, where: str) -> DSSError:
    if "infinity" in error.msg:
        return NotFinite(f"A number is too large ({where}).")
    return MalformedBody(f"The body is not valid JSON ({where}).")


def _check_names(document: dict[str, Any]) -> None:
    for name in document:
        if name not in FIELDS:
            known = ", ".join(repr(field) for field in FIELDS)
            raise UnknownField(f"There is no field {fields.quoted(name)}; the fields are {known}.")


def _may_hold_booleans(body: bytes) -> bool:
    """`true` has a u, and so has the name `inputs` once; `false` has an l, which no number has."""
    first = body.find(b"u")
    return b"l" in body or body.find(b"u", first + 1) >= 0


def rows(
    inputs: object, suspicious: bool, bounds: Bounds = UNBOUNDED, first: int = 0
) -> NDArray[np.float32]:
    """Rows of JSON numbers as one array, [B,D]; the first thing that is wrong is named.

    `first` is the number of the first one, if others were read before.
    """
    if not isinstance(inputs, list):
        raise InvalidField(f"'inputs' must be a list of rows, not {kind(inputs)}.")
    if not inputs:
        raise EmptyBatch("'inputs' holds no row.")
    bounds.check_rows(first + len(inputs))
    packer = None
    packed = []
    for number, row in enumerate(inputs, first):
        if not isinstance(row, list):
            raise InvalidField(f"inputs[{number}] must be a list of numbers, not {kind(row)}.")
        if packer is None:
            if not first:
                bounds.check(len(inputs), len(row))
            packer = _packer(bounds.width if first and bounds.width else len(row))
        if len(row) * 4 != packer.size:
            raise RaggedRows(
                f"inputs[{number}] has {len(row)} numbers where inputs[0] has {packer.size // 4}."
            )
        try:
            packed.append(packer.pack(*row))  # takes real numbers and booleans, nothing else
        except struct.error:
            raise _not_a_number(number, row) from None
        if suspicious and bool in set(map(type, row)):
            raise _not_a_number(number, row)
    if not inputs[0]:
        raise WrongWidth("The rows of 'inputs' are empty.")
    flat = packed[0] if len(packed) == 1 else b"".join(packed)
    return np.ndarray((len(inputs), len(inputs[0])), np.float32, flat)


@lru_cache(maxsize=64)
def _packer(width: int) -> struct.Struct:
    return struct.Struct(f"{width}f")


def _not_a_number(number: int, row: list[Any]) -> NotANumber:
    place, value = next((i, v) for i, v in enumerate(row) if type(v) not in (int, float))
    return NotANumber(f"inputs[{number}][{place}] must be a number, not {kind(value)}.")


def float32(values: NDArray[np.floating[Any]], first: int = 0) -> NDArray[np.float32]:
    """Rows as float32; `first` is the number of the first one."""
    if values.dtype == FLOAT32:
        # Aligned, because a header of odd length leaves the data at an odd address.
        return values if values.flags.aligned else values.copy()
    check_finite(values, NPY, first)
    with np.errstate(over="ignore"):
        hidden = values.astype(np.float32)
    check_finite(hidden, JSON, first)
    return hidden


def check_finite(values: NDArray[np.floating[Any]], media_type: str, first: int = 0) -> None:
    """Say which number is none: the engine looks for them anyway, so decoders need not."""
    finite = np.isfinite(values)
    if not finite.all():
        row, place = np.argwhere(~finite)[0].tolist()
        raise NotFinite(f"inputs[{first + row}][{place}] {NOT_FINITE[media_type]}.")


# --- answers ---------------------------------------------------------------------------------


def encode_json(source: Source, answer: Answered, promise: str | None = None) -> bytes:
    """Columnar JSON; "labels" only if the model has them, the last three only if asked for."""
    document: dict[str, Any] = {
        "model": source.model,
        "version": source.version,
        "classes": answer.classes,
        "log_probs": answer.log_probs,
    }
    if source.labels is not None:
        document["labels"] = source.labels[answer.classes].tolist()
    document |= {"experts": answer.experts, "gates": answer.gates}
    if answer.rungs is not None:
        document |= {"searched": answer.searched, "rungs": RUNG_NAMES[answer.rungs].tolist()}
    if promise is not None:
        document["promise"] = promise
    return orjson.dumps(document, default=_contiguous, option=orjson.OPT_SERIALIZE_NUMPY)


def _contiguous(value: object) -> NDArray[Any]:
    """orjson takes C-contiguous arrays; a slice of a joined answer may not be one."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value)
    raise TypeError


def encode_npy(source: Source, answer: Answered, promise: str | None = None) -> bytes:
    """One record per row: np.load(file)["classes"] is [B,k], and so on. It carries no labels, and
    leaves the promise to a header."""
    del source, promise
    rows, k = answer.classes.shape
    plain = answer.rungs is None
    if rows == 1 and plain:  # its bytes lie one after the other already
        return b"".join(
            (
                npy_header(1, k),
                answer.classes.tobytes(),
                answer.log_probs.tobytes(),
                answer.experts.tobytes(),
                answer.gates.tobytes(),
            )
        )
    return npy_header(rows, k, plain) + npy_records(answer, slice(None))


def npy_records(answer: Answered, rows: slice) -> bytes:
    """Some rows of a .npy answer."""
    experts = answer.experts[rows]
    records = np.empty(
        len(experts), npy.answer_record(answer.classes.shape[1], answer.rungs is None)
    )
    records["classes"] = answer.classes[rows]
    records["log_probs"] = answer.log_probs[rows]
    records["experts"] = experts
    records["gates"] = answer.gates[rows]
    if answer.rungs is not None and answer.searched is not None:
        records["searched"] = answer.searched[rows]
        records["rungs"] = RUNG_NAMES[answer.rungs[rows]]
    return records.tobytes()


@lru_cache(maxsize=1024)
def npy_header(rows: int, k: int, plain: bool = True) -> bytes:
    return npy.header_of(npy.answer_record(k, plain), (rows,))


ENCODERS: Mapping[str, Encoder] = {JSON: encode_json, NPY: encode_npy}
