"""The paths that answer top-k: what their heads, bodies and answers mean, and which model they ask.

They stand before the application, because a framework's route costs more than an expert; FastAPI
declares the same routes for its document only. What a path, some headers or a model come to is
worked out once and kept. How a request goes from step to step is in `exchange.py`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from service.errors import NotFinite
from service.http import body as limits
from service.http import codecs, compression
from service.http.codecs import Decoder, Encoder
from service.http.compression import Coding
from service.http.state import AppState
from service.repository.catalog import Catalog
from service.repository.model import Model
from service.telemetry.metrics.http import HttpCounter
from service.topk import Answered

FORMATS_KEPT = 256
TARGETS_KEPT = 1024  # clients choose how they spell a version or label

Header = tuple[bytes, bytes]


class Place(NamedTuple):
    """What a path asks for."""

    native: bool  # or in the Open Inference Protocol
    route: str  # the template, as FastAPI has it
    name: str | None  # None: the default model
    version: str | None  # None: the newest good one


class Target(NamedTuple):
    """A place's model, and what never changes about its answers."""

    model: Model
    model_header: Header
    version_header: Header
    good: HttpCounter


class Asked(NamedTuple):
    """What a request's body asks for."""

    hidden: NDArray[np.float32]  # [B,D]
    k: int | None  # None: as many as is usual for the model
    experts: int
    media_type: str  # what the rows came as
    wish: Any  # what the path needs to encode the answer
    seconds: float | None = None  # how long the client will wait, if its body says so


DEFAULT = Place(True, "/topk", None, None)


def place(path: str) -> Place | None:
    if path == "/topk":
        return DEFAULT
    match path.split("/", 7):
        case "", "models", name, "topk" if name:
            return Place(True, "/models/{name}/topk", name, None)
        case "", "models", name, "versions", version, "topk" if name and version:
            return Place(True, "/models/{name}/versions/{version}/topk", name, version)
        case "", "v2", "models", name, "infer" if name:
            return Place(False, "/v2/models/{name}/infer", name, None)
        case "", "v2", "models", name, "versions", version, "infer" if name and version:
            return Place(False, "/v2/models/{name}/versions/{version}/infer", name, version)
    return None


HeadT = TypeVar("HeadT")  # what a path makes of a request's head


class InferenceHandler(ABC, Generic[HeadT]):
    """How a request is answered, whatever its protocol."""

    def __init__(self, state: AppState) -> None:
        self.state = state
        self._catalog: Catalog | None = None
        self._targets: dict[Place, Target] = {}  # of the catalog

    @abstractmethod
    def read_head(self, headers: Iterable[Header], query_string: bytes) -> HeadT: ...

    @abstractmethod
    def read_body(self, head: HeadT, body: bytes) -> Asked: ...

    @abstractmethod
    def encode(
        self, head: HeadT, asked: Asked, target: Target, answer: Answered
    ) -> tuple[list[Header], bytes]: ...

    def ask(
        self, target: Target, asked: Asked, deadline: float
    ) -> "Answered | asyncio.Future[Answered]":
        hidden, k, experts, media_type, _, _ = asked
        model = target.model
        if k is None:
            k = model.default_k
        limits.check(len(hidden), k, self.state.settings.limits)
        try:
            return model.batcher.ask(hidden, k, experts, deadline)
        except NotFinite:
            codecs.check_finite(hidden, media_type)
            raise

    def refresh(self) -> None:
        """Let go of a catalog that no longer serves; nobody may ask for a while."""
        self._catalog, self._targets = None, {}

    def target(self, place: Place) -> Target:
        """The model that answers now. Ask it in the same turn of the event loop."""
        repository = self.state.repository
        catalog = repository.catalog
        if catalog is not self._catalog:
            self._catalog = catalog
            self._targets = {}
        target = self._targets.get(place)
        if target is None:
            model = repository.get(place.name, place.version)
            target = Target(
                model,
                (b"dss-model", model.name.encode()),
                (b"dss-model-version", b"%d" % model.version),
                self.state.metrics.http.cell(place.route, "POST", 200),
            )
            if len(self._targets) >= TARGETS_KEPT:
                self._targets.clear()
            self._targets[place] = target
        return target


class Format(NamedTuple):
    """What a request's headers ask for."""

    media_type: str  # of the body
    decode: Decoder
    encode: Encoder
    header: Header  # of the answer
    coding: Coding | None  # of the body
    wished: Coding | None  # of the answer


Head = tuple[Format, bytes]  # and the query string
# Content-Type, Content-Encoding, Accept and Accept-Encoding
Wishes = tuple[bytes | None, bytes | None, bytes | None, bytes | None]


class NativeHandler(InferenceHandler[Head]):
    """{"inputs": [[...]], "k": 10} or .npy, and answers alike."""

    def __init__(self, state: AppState) -> None:
        super().__init__(state)
        self._formats: dict[Wishes, Format] = {}

    def read_head(self, headers: Iterable[Header], query_string: bytes) -> Head:
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
        wishes = (content_type, content_encoding, accept, accept_encoding)
        format_ = self._formats.get(wishes)
        if format_ is None:
            format_ = self._format(wishes)
        return format_, query_string

    def read_body(self, head: Head, body: bytes) -> Asked:
        format_, query_string = head
        if format_.coding is not None:
            most = self.state.settings.limits.max_body_bytes
            body = compression.expand(body, format_.coding, most)
        hidden, k, experts = format_.decode(body, query_string)
        return Asked(hidden, k, experts, format_.media_type, None)

    def encode(
        self, head: Head, asked: Asked, target: Target, answer: Answered
    ) -> tuple[list[Header], bytes]:
        del asked
        format_ = head[0]
        content = format_.encode(target.model.source, answer)
        headers = [
            # The .npy answer has no other place for them.
            target.model_header,
            target.version_header,
            format_.header,
        ]
        if format_.wished is not None:
            content = compression.compressed(content, format_.wished, headers)
        headers.append((b"content-length", b"%d" % len(content)))
        return headers, content

    def _format(self, wishes: Wishes) -> Format:
        content_type, content_encoding, accept, accept_encoding = wishes
        answer_type = codecs.answer_type(_text(accept))
        request_type = codecs.request_type(_text(content_type))
        format_ = Format(
            request_type,
            codecs.DECODERS[request_type],
            codecs.ENCODERS[answer_type],
            (b"content-type", answer_type.encode()),
            compression.of_body(content_encoding),
            compression.wished(accept_encoding),
        )
        if len(self._formats) >= FORMATS_KEPT:
            self._formats.clear()
        self._formats[wishes] = format_
        return format_


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
