"""What an inference protocol must do: read request heads and bodies, write answers.

`native.py` and `v2.py` are the two protocols; `request.py` takes a request from step to step. They
stand before FastAPI, because a framework's route costs more than an expert. What a path, some
headers or a model come to is worked out once and kept.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from service.errors import DSSError, Kind, KOutOfRange, NotFinite
from service.http import codecs
from service.http.codecs import InvalidField
from service.http.inference.routes import Place
from service.http.state import AppState
from service.repository.catalog import Catalog
from service.repository.model import Model
from service.settings import Limits
from service.topk import Answered

TARGETS_KEPT = 1024  # clients choose how they spell a version or an alias
TIMEOUT = b"dss-timeout"

Header = tuple[bytes, bytes]
HeadT = TypeVar("HeadT")  # what a protocol makes of a request head


class TooManyRows(DSSError):
    kind = Kind.TOO_LARGE


class TooManyAnswers(DSSError):
    """Rows times k: the answer would be too large."""

    kind = Kind.TOO_LARGE


class Target(NamedTuple):
    """The model that answers at a place, and what never changes about its answers."""

    model: Model
    model_header: Header
    version_header: Header


class Asked(NamedTuple):
    """What a request's body asks for."""

    hidden: NDArray[np.float32]  # [B,D]
    k: int | None  # None: as many as is usual for the model
    experts: int
    media_type: str  # what the rows came as
    request: Any  # what the protocol needs to encode the answer
    seconds: float | None = None  # how long the client will wait, if its body says so


class RequestHead(NamedTuple):
    """What a request head says, whatever the protocol."""

    head: Any  # the protocol's part
    seconds: float  # until the answer must be there
    length: bytes | None  # of the body, as announced


class InferenceHandler(ABC, Generic[HeadT]):
    """One protocol's part in answering a request."""

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

    def read_request_head(self, headers: Iterable[Header], query_string: bytes) -> RequestHead:
        seconds = self.state.settings.limits.request_seconds
        length = None
        for name, value in headers:
            if name == TIMEOUT:
                seconds = min(seconds, _seconds(value))
            elif name == b"content-length":
                length = value
        return RequestHead(self.read_head(headers, query_string), seconds, length)

    def ask(
        self, target: Target, asked: Asked, deadline: float
    ) -> "Answered | asyncio.Future[Answered]":
        """Asks the model's batcher, within the limits of a request."""
        hidden, k, experts, media_type, _, _ = asked
        model = target.model
        if k is None:
            k = model.default_k
        check_limits(len(hidden), k, self.state.settings.limits)
        try:
            return model.batcher.ask(hidden, k, experts, deadline)
        except NotFinite:
            codecs.check_finite(hidden, media_type)
            raise

    def refresh(self) -> None:
        """Lets go of a catalog that no longer serves, since no request may come for a while."""
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
            )
            if len(self._targets) >= TARGETS_KEPT:
                self._targets.clear()
            self._targets[place] = target
        return target


def check_limits(rows: int, k: int, limits: Limits) -> None:
    if rows > limits.max_rows:
        raise TooManyRows(f"The request has {rows} rows; at most {limits.max_rows} are answered.")
    if k > limits.max_k:
        raise KOutOfRange(f"k is {k}; this server answers at most {limits.max_k}.")
    if rows * k > limits.max_answers:
        raise TooManyAnswers(
            f"{rows} rows with k = {k} ask for {rows * k} answers;"
            f" one request may have {limits.max_answers}."
        )


def _seconds(value: bytes) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise InvalidField("DSS-Timeout must be a positive number of seconds.")
    return seconds
