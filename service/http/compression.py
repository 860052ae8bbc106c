"""Content-Encoding gzip and deflate, of bodies and of answers.

A body is never let grow beyond the limit that one sent plainly has. An answer is compressed only
for a client that names one coding and nothing else, as `tritonclient` does if told to: compressing
costs more than computing the answer, and HTTP libraries send lists of codings by
themselves, whether their user wants it or not.
"""

import re
import zlib
from collections.abc import Generator
from typing import NamedTuple

from service.errors import DSSError, Kind
from service.http.codecs import MalformedBody, UnsupportedMediaType
from service.http.pieces import PIECE_BYTES
from service.settings import Limits

Header = tuple[bytes, bytes]

LEVEL = 1
WORTHWHILE = 1024  # bytes of an answer: a shorter one hardly shrinks
LONGEST = 256 * 1024  # of an answer that is compressed: a longer one takes too long
FREE_BYTES = 2**20  # that a body may always grow to, however well it compresses
NO_QUALITY = re.compile(rb"\s*q=0(\.0*)?\s*")


class BodyGrowsTooLarge(DSSError):
    """Decompressed, the body is larger than one may be."""

    kind = Kind.TOO_LARGE


class Coding(NamedTuple):
    name: str
    window_bits: int  # and the container's format, as zlib wants to be told
    headers: tuple[Header, Header]  # of an answer


def _coding(name: str, window_bits: int) -> Coding:
    headers = ((b"content-encoding", name.encode()), (b"vary", b"accept-encoding"))
    return Coding(name, window_bits, headers)


CODINGS = {b"gzip": _coding("gzip", 31), b"deflate": _coding("deflate", 15)}


def of_body(content_encoding: bytes | None) -> Coding | None:
    """What a Content-Encoding header says; None if the body is as it is."""
    if content_encoding is None:
        return None
    name = content_encoding.strip().lower()
    if name == b"identity":
        return None
    if name not in CODINGS:
        raise UnsupportedMediaType("The Content-Encoding must be gzip, deflate or identity.")
    return CODINGS[name]


def for_answer(accept_encoding: bytes | None) -> Coding | None:
    """The coding of an answer, if an Accept-Encoding header asks for just one."""
    if accept_encoding is None:
        return None
    name, _, quality = accept_encoding.partition(b";")
    if b"," in accept_encoding or NO_QUALITY.fullmatch(quality.lower()):
        return None
    return CODINGS.get(name.strip().lower())


def expanded_bytes(body: bytes, coding: Coding, limits: Limits) -> int:
    """How large the body may get, before any of it is decompressed.

    A gzip body says how large it is, and is held to it.
    """
    size = max(FREE_BYTES, limits.max_expansion * len(body))
    if coding.name == "gzip":
        said = int.from_bytes(body[-4:], "little")
        if said > min(size, limits.max_body_bytes):
            raise _grows_too_large(min(size, limits.max_body_bytes), len(body))
        size = said
    return min(size, limits.max_body_bytes)


def expand_at_once(body: bytes, coding: Coding, most: int) -> bytes | None:
    """The body as it was before it was compressed; None if it is larger than `most`."""
    if len(body) > most:
        return None
    unpacking = zlib.decompressobj(coding.window_bits)
    plain = _expand(unpacking, body, coding, most + 1)
    if len(plain) > most:
        return None
    _check_end(unpacking, coding)
    return plain


def expand(body: bytes, coding: Coding, most: int) -> Generator[None, None, bytes]:
    """The same a piece at a time; given up once it is larger than `most`."""
    unpacking = zlib.decompressobj(coding.window_bits)
    plain: list[bytes] = []
    size = 0
    for begin in range(0, len(body), PIECE_BYTES):
        packed = body[begin : begin + PIECE_BYTES]
        while packed and not unpacking.eof:
            plain.append(_expand(unpacking, packed, coding, PIECE_BYTES))
            packed = unpacking.unconsumed_tail
            size += len(plain[-1])
            if size > most:
                raise _grows_too_large(most, len(body))
            yield
        if unpacking.eof and begin + PIECE_BYTES < len(body):
            raise MalformedBody(f"Something follows the end of the {coding.name} body.")
    # What is left in the decompressor's own buffer.
    while rest := _expand(unpacking, b"", coding, PIECE_BYTES):
        plain.append(rest)
        size += len(rest)
        if size > most:
            raise _grows_too_large(most, len(body))
        yield
    _check_end(unpacking, coding)
    return b"".join(plain)


def _expand(unpacking: "zlib._Decompress", packed: bytes, coding: Coding, most: int) -> bytes:
    try:
        return unpacking.decompress(packed, most)
    except zlib.error:
        raise MalformedBody(f"The body is not {coding.name}, as Content-Encoding says.") from None


def _check_end(unpacking: "zlib._Decompress", coding: Coding) -> None:
    if not unpacking.eof:
        raise MalformedBody(f"The {coding.name} body is cut short.")
    if unpacking.unused_data:
        raise MalformedBody(f"Something follows the end of the {coding.name} body.")


def _grows_too_large(most: int, packed: int) -> BodyGrowsTooLarge:
    return BodyGrowsTooLarge(
        f"Decompressed, the body is larger than {most} bytes, which is as much as {packed}"
        " compressed bytes may hold."
    )


def compressed_parts(
    parts: list[bytes], coding: Coding | None, headers: list[Header]
) -> Generator[None, None, list[bytes]]:
    """The same for content that comes in parts."""
    if coding is None or sum(map(len, parts)) > LONGEST:
        return parts
    return [(yield from compressed(b"".join(parts), coding, headers))]


def compressed(
    content: bytes, coding: Coding, headers: list[Header]
) -> Generator[None, None, bytes]:
    """The content of an answer, compressed if that is worth it; its headers then say so."""
    if not WORTHWHILE <= len(content) <= LONGEST:
        return content
    packing = zlib.compressobj(LEVEL, zlib.DEFLATED, coding.window_bits)
    packed: list[bytes] = []
    for begin in range(0, len(content), PIECE_BYTES):
        packed.append(packing.compress(content[begin : begin + PIECE_BYTES]))
        yield
    packed.append(packing.flush())
    whole = b"".join(packed)
    if len(whole) >= len(content):
        return content
    headers += coding.headers
    return whole
