"""The native protocol: {"inputs": [[...]], "k": 10} or .npy in, JSON or .npy out."""

from collections.abc import Iterable
from typing import NamedTuple

from service import npy
from service.http import codecs, compression, large_answers, large_bodies
from service.http.codecs import Bounds, Decoder, Encoder
from service.http.compression import Coding
from service.http.inference.handler import Asked, Header, InferenceHandler, Target
from service.http.large_answers import Parts
from service.http.pieces import Pieces, at_once
from service.http.state import AppState
from service.topk import Answered

FORMATS_KEPT = 256
NPY_BYTES = 12  # of a class and its log-probability


class Format(NamedTuple):
    """What a request's headers ask for."""

    media_type: str  # of the body
    answer_type: str
    decode: Decoder
    encode: Encoder
    header: Header  # of the answer
    body_coding: Coding | None
    answer_coding: Coding | None


NativeHead = tuple[Format, bytes]  # and the query string
# Content-Type, Content-Encoding, Accept and Accept-Encoding
Preferences = tuple[bytes | None, bytes | None, bytes | None, bytes | None]


class NativeHandler(InferenceHandler[NativeHead]):
    """The native protocol's part in answering a request."""

    def __init__(self, state: AppState) -> None:
        super().__init__(state)
        self._formats: dict[Preferences, Format] = {}

    def read_head(self, headers: Iterable[Header], query_string: bytes) -> NativeHead:
        content_type = content_encoding = accept = accept_encoding = None
        for name, value in headers:
            if name == b"content-type":
                content_type = content_type or value
            elif name == b"accept":
                accept = codecs.joined(accept, value)
            elif name == b"content-encoding":
                content_encoding = codecs.joined(content_encoding, value)
            elif name == b"accept-encoding":
                accept_encoding = codecs.joined(accept_encoding, value)
        preferences = (content_type, content_encoding, accept, accept_encoding)
        format_ = self._formats.get(preferences)
        if format_ is None:
            format_ = self._format(preferences)
        return format_, query_string

    def body_coding(self, head: NativeHead) -> Coding | None:
        return head[0].body_coding

    def is_quick(self, head: NativeHead, body: bytes) -> bool:
        return head[0].media_type == codecs.NPY and npy.is_float32(body)

    def read_body(self, head: NativeHead, body: bytes, bounds: Bounds) -> Asked:
        format_, query_string = head
        query = format_.decode(body, query_string, bounds)
        return Asked(*query, format_.media_type, None)

    def read_large_body(self, head: NativeHead, body: bytes, bounds: Bounds) -> Pieces[Asked]:
        format_, query_string = head
        decode = large_bodies.DECODERS[format_.media_type]
        query = yield from decode(body, query_string, bounds)
        return Asked(*query, format_.media_type, None)

    def answer_bytes(self, head: NativeHead, asked: Asked, target: Target) -> int:
        del asked
        return NPY_BYTES if head[0].answer_type == codecs.NPY else target.json_bytes

    def encode(
        self, head: NativeHead, asked: Asked, target: Target, answer: Answered
    ) -> tuple[list[Header], bytes]:
        format_ = head[0]
        content = format_.encode(target.model.source, answer, asked.promise)
        headers = _headers(format_, target, asked)
        if format_.answer_coding is not None:
            content = at_once(compression.compressed(content, format_.answer_coding, headers))
        headers.append((b"content-length", b"%d" % len(content)))
        return headers, content

    def encode_large(
        self, head: NativeHead, asked: Asked, target: Target, answer: Answered
    ) -> Pieces[tuple[list[Header], Parts]]:
        format_ = head[0]
        encode = large_answers.ENCODERS[format_.answer_type]
        parts = yield from encode(target.model.source, answer, asked.promise)
        headers = _headers(format_, target, asked)
        parts = yield from compression.compressed_parts(parts, format_.answer_coding, headers)
        headers.append((b"content-length", b"%d" % sum(map(len, parts))))
        return headers, parts

    def _format(self, preferences: Preferences) -> Format:
        content_type, content_encoding, accept, accept_encoding = preferences
        answer_type = codecs.answer_type(_text(accept))
        request_type = codecs.request_type(_text(content_type))
        format_ = Format(
            request_type,
            answer_type,
            codecs.DECODERS[request_type],
            codecs.ENCODERS[answer_type],
            (b"content-type", answer_type.encode()),
            compression.of_body(content_encoding),
            compression.for_answer(accept_encoding),
        )
        if len(self._formats) >= FORMATS_KEPT:
            self._formats.clear()
        self._formats[preferences] = format_
        return format_


def _headers(format_: Format, target: Target, asked: Asked) -> list[Header]:
    """What a .npy answer has no other place for, and its media type."""
    headers = [target.model_header, target.version_header, format_.header]
    if asked.promise is not None:
        headers.append((b"dss-promise", asked.promise.encode()))
    return headers


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
