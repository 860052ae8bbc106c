"""The paths that answer top-k: plain ASGI, because a framework's route costs more than an expert.

They stand before the application; FastAPI declares the same routes for its document only. What a
path, some headers or a model come to is worked out once and kept.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service import codecs, limits, problems
from service.batcher import Answered
from service.codecs import Decoder, Encoder
from service.errors import DSSError, NotFinite
from service.metrics import HttpCell
from service.model import Model
from service.repository import Catalog
from service.state import State

logger = logging.getLogger(__name__)

FORMATS_KEPT = 256

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
    good: HttpCell


class Asked(NamedTuple):
    """What a request's body asks for."""

    hidden: NDArray[np.float32]  # [B,D]
    k: int | None  # None: as many as is usual for the model
    experts: int
    media_type: str  # what the rows came as
    wish: Any  # what the path needs to encode the answer


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


class HotPath(ABC, Generic[HeadT]):
    """How a request is answered, whatever its protocol."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._limits = state.settings.limits
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

    async def __call__(self, place: Place, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = perf_counter()
        found = ""
        try:
            target = self.target(place)
            found = target.model.name
            headers = scope["headers"]
            head = self.read_head(headers, scope["query_string"])
            body = limits.read_body(receive, _announced(headers), self._limits)
            if not isinstance(body, bytes):
                body = await body
            asked = self.read_body(head, body)
            answer = self.ask(target, asked)
            if isinstance(answer, asyncio.Future):
                answer = await answer
            headers, content = self.encode(head, asked, target, answer)
        except ClientDisconnect:
            logger.debug("A client left before its request was complete.")
            return
        except Exception as error:
            await self._failure(error, place, found, scope, arrived)(scope, receive, send)
            return
        # Counted before it leaves, so that a client that has its answer finds it counted.
        target.good.answered(perf_counter() - arrived)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def ask(self, target: Target, asked: Asked) -> "Answered | asyncio.Future[Answered]":
        hidden, k, experts, media_type, _ = asked
        model = target.model
        if k is None:
            k = model.default_k
        limits.check(len(hidden), k, self._limits)
        try:
            return model.batcher.ask(hidden, k, experts)
        except NotFinite:
            codecs.check_finite(hidden, media_type)
            raise

    def target(self, place: Place) -> Target:
        repository = self._state.repository
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
                self._state.metrics.http.cell(place.route, "POST", 200),
            )
            self._targets[place] = target
        return target

    def _failure(
        self, error: Exception, place: Place, model: str, scope: Scope, arrived: float
    ) -> Response:
        """The answer to a request that failed, counted."""
        if isinstance(error, DSSError):
            self._state.metrics.rejected(model, problems.reason(error))
        try:
            answer = problems.of_failure(error, scope)
        except Exception:  # not one that clients may see
            logger.error("POST %s failed.", place.route, exc_info=error)
            answer = problems.of_unknown_failure(scope)
        seconds = perf_counter() - arrived
        self._state.metrics.http.answered(place.route, "POST", answer.status_code, seconds)
        return answer


class Format(NamedTuple):
    """What a request's headers ask for."""

    media_type: str  # of the body
    decode: Decoder
    encode: Encoder
    header: Header  # of the answer


Head = tuple[Format, bytes]  # and the query string


class TopKPath(HotPath[Head]):
    """{"inputs": [[...]], "k": 10} or .npy, and answers alike."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._formats: dict[tuple[bytes | None, bytes | None, bytes | None], Format] = {}

    def read_head(self, headers: Iterable[Header], query_string: bytes) -> Head:
        content_type = content_encoding = accept = None
        for name, value in headers:
            if name == b"content-type":
                content_type = content_type or value
            elif name == b"accept":
                accept = value if accept is None else accept + b"," + value
            elif name == b"content-encoding":
                content_encoding = content_encoding or value
        format_ = self._formats.get((content_type, content_encoding, accept))
        if format_ is None:
            format_ = self._format(content_type, content_encoding, accept)
        return format_, query_string

    def read_body(self, head: Head, body: bytes) -> Asked:
        format_, query_string = head
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
            (b"content-length", b"%d" % len(content)),
            format_.header,
        ]
        return headers, content

    def _format(
        self, content_type: bytes | None, content_encoding: bytes | None, accept: bytes | None
    ) -> Format:
        answer_type = codecs.answer_type(_text(accept))
        request_type = codecs.request_type(_text(content_type), _text(content_encoding))
        format_ = Format(
            request_type,
            codecs.DECODERS[request_type],
            codecs.ENCODERS[answer_type],
            (b"content-type", answer_type.encode()),
        )
        if len(self._formats) >= FORMATS_KEPT:
            self._formats.clear()
        self._formats[content_type, content_encoding, accept] = format_
        return format_


def _announced(headers: Iterable[Header]) -> bytes | None:
    for name, value in headers:
        if name == b"content-length":
            return value
    return None


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
