"""Content-Encoding gzip and deflate, of bodies and of answers.

A body is never let grow beyond the limit that one sent plainly has. An answer is compressed only
for a client that names one coding and nothing else, as `tritonclient` does if told to: compressing
costs more than computing the answer, and HTTP libraries send lists of codings by
themselves, whether their user wants it or not.
"""

import re
import zlib
from typing import NamedTuple

from service.errors import DSSError, Kind
from service.http.codecs import MalformedBody, UnsupportedMediaType

Header = tuple[bytes, bytes]

LEVEL = 1
WORTHWHILE = 1024  # bytes of an answer: a shorter one hardly shrinks
LONGEST = 256 * 1024  # a longer one would hold up the event loop
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


def expand(body: bytes, coding: Coding, most: int) -> bytes:
    """The body as it was before it was compressed; given up once it is larger than `most`."""
    unpacking = zlib.decompressobj(coding.window_bits)
    try:
        plain = unpacking.decompress(body, most + 1)
    except zlib.error:
        raise MalformedBody(f"The body is not {coding.name}, as Content-Encoding says.") from None
    if len(plain) > most:
        raise BodyGrowsTooLarge(f"Decompressed, the body is larger than {most} bytes.")
    if not unpacking.eof:
        raise MalformedBody(f"The {coding.name} body is cut short.")
    if unpacking.unused_data:
        raise MalformedBody(f"Something follows the end of the {coding.name} body.")
    return plain


def compressed(content: bytes, coding: Coding, headers: list[Header]) -> bytes:
    """The content of an answer, compressed if that is worth it; its headers then say so."""
    if not WORTHWHILE <= len(content) <= LONGEST:
        return content
    packing = zlib.compressobj(LEVEL, zlib.DEFLATED, coding.window_bits)
    packed = packing.compress(content) + packing.flush()
    if len(packed) >= len(content):
        return content
    headers += coding.headers
    return packed
