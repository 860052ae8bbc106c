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
from service.http import codecs, compression, promises
from service.http.codecs import Bounds
from service.http.compression import Coding
from service.http.fields import InvalidField
from service.http.inference.routes import Place
from service.http.large_answers import Parts
from service.http.pieces import PIECE_BYTES, Pieces
from service.http.promises import Promise
from service.http.state import AppState
from service.repository.catalog import Catalog
from service.repository.model import Model
from service.settings import Limits
from service.topk import SPARSE, Answered, Mode

TARGETS_KEPT = 1024  # clients choose how they spell a version or an alias
TIMEOUT = b"dss-timeout"
LARGE_BODY = 2 * PIECE_BYTES  # is decoded in pieces
LARGE_ANSWER = 131_072  # bytes in JSON, at most: is encoded in pieces
NUMBER_BYTES = 20  # of a log-probability in JSON, and the commas around it, a class and a label

Header = tuple[bytes, bytes]
HeadT = TypeVar("HeadT")  # what a protocol makes of a request head


class TooManyAnswers(DSSError):
    """Rows times k: the answer would be too large."""

    kind = Kind.TOO_LARGE


class AnswerTooLarge(DSSError):
    kind = Kind.TOO_LARGE


class TooMuchToSearch(DSSError):
    """Rows times the classes that are searched for each."""

    kind = Kind.TOO_LARGE


class Target(NamedTuple):
    """The model that answers at a place, and what never changes about it."""

    model: Model
    model_header: Header
    version_header: Header
    bounds: Bounds  # of a request's rows
    json_bytes: int  # that one answer takes in JSON at most, with its label
    mode: Mode  # of requests that name neither experts nor a mode


class Asked(NamedTuple):
    """What a request's body asks for."""

    hidden: NDArray[np.float32]  # [B,D]
    k: int | None  # None: as many as is usual for the model
    experts: int
    mode: Mode | None  # None: as is usual for the server
    media_type: str  # what the rows came as
    request: Any  # what the protocol needs to encode the answer
    seconds: float | None = None  # how long the client will wait, if its body says so
    promise: Promise | None = None  # what becomes of a promised recall


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
    def body_coding(self, head: HeadT) -> Coding | None: ...

    @abstractmethod
    def is_quick(self, head: HeadT, body: bytes) -> bool:
        """Whether a body is read without looking at its numbers, however large it is."""

    @abstractmethod
    def read_body(self, head: HeadT, body: bytes, bounds: Bounds) -> Asked:
        """What a body asks for, once it is decompressed."""

    @abstractmethod
    def read_large_body(self, head: HeadT, body: bytes, bounds: Bounds) -> Pieces[Asked]:
        """The same in pieces."""

    @abstractmethod
    def answer_bytes(self, head: HeadT, asked: Asked, target: Target) -> int:
        """As many bytes as one of a row's k answers can take."""

    @abstractmethod
    def encode(
        self, head: HeadT, asked: Asked, target: Target, answer: Answered
    ) -> tuple[list[Header], bytes]: ...

    @abstractmethod
    def encode_large(
        self, head: HeadT, asked: Asked, target: Target, answer: Answered
    ) -> Pieces[tuple[list[Header], Parts]]:
        """The same in pieces."""

    def body_at_once(self, head: HeadT, body: bytes) -> bytes | None:
        """A decompressed body that can be read in one turn of the event loop; None: in pieces."""
        coding = self.body_coding(head)
        if coding is not None:
            return compression.expand_at_once(body, coding, LARGE_BODY)
        if len(body) <= LARGE_BODY or self.is_quick(head, body):
            return body
        return None

    def large_body_bytes(self, head: HeadT, body: bytes) -> int:
        """How large a body may get when it is decompressed."""
        coding = self.body_coding(head)
        if coding is None:
            return len(body)
        return compression.expanded_bytes(body, coding, self.state.settings.limits)

    def body_in_pieces(self, head: HeadT, body: bytes, size: int, bounds: Bounds) -> Pieces[Asked]:
        """`size` is what it may get to when it is decompressed."""
        coding = self.body_coding(head)
        if coding is not None:
            body = yield from compression.expand(body, coding, size)
        if self.is_quick(head, body):
            return self.read_body(head, body, bounds)
        return (yield from self.read_large_body(head, body, bounds))

    def read_request_head(self, headers: Iterable[Header], query_string: bytes) -> RequestHead:
        seconds = self.state.settings.limits.request_seconds
        length = None
        for name, value in headers:
            if name == TIMEOUT:
                seconds = min(seconds, _seconds(value))
            elif name == b"content-length":
                length = value
        return RequestHead(self.read_head(headers, query_string), seconds, length)

    def settle_mode(self, asked: Asked, target: Target) -> Asked:
        """Settles how a request is answered that names no mode, or asks for a promise."""
        mode = target.mode if asked.mode is None else asked.mode
        if mode.recall is None:
            return asked
        settings = self.state.settings.answers
        mode, promise = promises.promised(target.model, mode, len(asked.hidden), settings)
        return asked._replace(mode=mode, promise=promise)

    def ask(
        self, head: HeadT, target: Target, asked: Asked, deadline: float
    ) -> "Answered | asyncio.Future[Answered]":
        """Asks the model's batcher, within the limits of a request."""
        hidden, k, experts, mode, media_type, _, _, _ = asked
        model = target.model
        mode = mode or SPARSE
        if k is None:
            k = model.default_k
        rows, limits = len(hidden), self.state.settings.limits
        check_limits(rows, k, limits)
        size = rows * k * self.answer_bytes(head, asked, target)
        if size > LARGE_ANSWER:
            self.state.budget.check_large(size)
        if size > limits.max_answer_bytes:
            raise AnswerTooLarge(
                f"The answer to {rows} rows with k = {k} may take more than"
                f" {limits.max_answer_bytes} bytes; ask for fewer rows or a smaller k."
            )
        if rows * model.engine.row_scores(k, experts, mode) > limits.max_scores:
            raise _too_much(rows, experts, mode, limits)
        try:
            return model.batcher.ask(hidden, k, experts, mode, deadline)
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
                Bounds(self.state.settings.limits.max_rows, model.engine.hidden_size),
                NUMBER_BYTES + len(str(model.manifest.n_classes)) + model.source.label_bytes_most,
                promises.usual_mode(model, self.state.settings.answers),
            )
            if len(self._targets) >= TARGETS_KEPT:
                self._targets.clear()
            self._targets[place] = target
        return target


def check_limits(rows: int, k: int, limits: Limits) -> None:
    if k > limits.max_k:
        raise KOutOfRange(f"k is {k}; this server answers at most {limits.max_k}.")
    if rows * k > limits.max_answers:
        raise TooManyAnswers(
            f"{rows} rows with k = {k} ask for {rows * k} answers;"
            f" one request may have {limits.max_answers}."
        )


def _too_much(rows: int, experts: int, mode: Mode, limits: Limits) -> TooMuchToSearch:
    if mode.exact or mode.recall is not None:
        return TooMuchToSearch(
            f"{rows} rows for which all classes may be scanned take more than {limits.max_scores}"
            " scores; ask for fewer rows."
        )
    return TooMuchToSearch(
        f"{rows} rows with experts = {experts} take more than {limits.max_scores} scores;"
        " ask for fewer rows or fewer experts."
    )


def _seconds(value: bytes) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise InvalidField("DSS-Timeout must be a positive number of seconds.")
    return seconds
