"""What both clients do, as steps that wait for nothing: a generator yields what shall be done next
and is sent what came of it. So there is one logic, and tests need neither servers nor sleep.
"""

import math
import operator
import os
import random
import re
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import orjson
from numpy.typing import ArrayLike

from service.client import answers, error_mapping, model_info
from service.client.answers import JSON, NPY, Answer
from service.client.errors import (
    AnswerMalformed,
    ClientError,
    DeadlineExceeded,
    Dropped,
    NotAuthorized,
    PartTooLarge,
    QueryRefused,
    Unavailable,
)
from service.client.http1 import Address, Deadline, Reply
from service.client.model_info import ExpertInfo, ModelInfo
from service.client.rows import PartLimits, Rows, body, rows

T = TypeVar("T")
Version = int | str  # a number or a label

MOST_SAMPLES = 64  # that a server gives at once
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds; chance takes a share of it
KEY_VARIABLE = "DSS_API_KEY"
FIT = re.compile(r"[!-~]+")  # to stand in a header


class Send(NamedTuple):
    """Send a message; a Reply or a ClientError comes back."""

    message: bytes
    deadline: Deadline
    fresh: bool  # on a connection that is new


class Pause(NamedTuple):
    seconds: float


class Together(NamedTuple):
    """Take all of these steps, a few at a time if there is a way; their results come back."""

    parts: Sequence["Steps[Answer]"]


Steps = Generator[Send | Pause | Together, Any, T]


class Query(NamedTuple):
    model: str | None  # None: the server's default
    version: Version | None  # None: what answers when none is named
    k: int | None  # None: as many as is usual for the model
    experts: int
    labels: bool

    @property
    def path(self) -> str:
        path = "" if self.model is None else f"/models/{quote(self.model, safe='')}"
        if self.version is not None:
            path += f"/versions/{quote(str(self.version), safe='')}"
        k = "" if self.k is None else f"k={self.k}&"
        return f"{path}/topk?{k}experts={self.experts}"


@dataclass
class Clock:
    """Tests have their own."""

    monotonic: Callable[[], float] = time.monotonic
    time_of_day: Callable[[], float] = time.time
    chance: Callable[[], float] = random.random


class Core:
    def __init__(
        self,
        where: Address,
        *,
        model: str | None = None,
        version: Version | None = None,
        api_key: str | None = None,
        timeout: float = 10.0,
        retries: int = 4,
        clock: Clock | None = None,
    ) -> None:
        if version is not None and model is None:
            raise QueryRefused("A version needs its model's name: pass model= as well.")
        self._where = where
        self._model, self._version = model, version
        self._timeout = _positive(timeout)
        self._retries = _count("retries", retries, least=0)
        self._clock = clock or Clock()
        self._limits = PartLimits()
        key = (api_key or os.environ.get(KEY_VARIABLE, "")).strip()
        if key and not FIT.fullmatch(key):
            raise NotAuthorized("The API key has characters that a header cannot carry.")
        self._has_key = bool(key)
        self._lines = f" HTTP/1.1\r\nHost: {where.authority}\r\nUser-Agent: dss-client\r\n" + (
            f"Authorization: Bearer {key}\r\n" if key else ""
        )

    # --- what users ask ----------------------------------------------------------------------

    def topk(
        self,
        hidden: ArrayLike,
        k: int | None,
        experts: int,
        model: str | None,
        version: Version | None,
        labels: bool,
        timeout: float | None,
    ) -> Steps[Answer]:
        if model is None:
            model = self._model
            version = self._version if version is None else version
        if version is not None and model is None:
            raise QueryRefused("A version needs its model's name: pass model= as well.")
        k = None if k is None else _count("k", k)
        query = Query(model, version, k, _count("experts", experts), labels)
        return (yield from self._answers(query, rows(hidden), self._deadline(timeout)))

    def models(self, timeout: float | None) -> Steps[list[ModelInfo]]:
        return (yield from self._get("/models", model_info.models, self._deadline(timeout)))

    def model(self, name: str | None, timeout: float | None) -> Steps[ModelInfo]:
        deadline = self._deadline(timeout)
        name = yield from self._named(name, deadline)
        return (yield from self._get(f"/models/{quote(name, safe='')}", model_info.model, deadline))

    def experts(self, name: str | None, timeout: float | None) -> Steps[list[ExpertInfo]]:
        deadline = self._deadline(timeout)
        name = yield from self._named(name, deadline)
        path = f"/models/{quote(name, safe='')}/experts"
        return (yield from self._get(path, model_info.experts, deadline))

    def samples(self, name: str | None, timeout: float | None) -> Steps[Rows]:
        deadline = self._deadline(timeout)
        version = self._version if name is None else None
        path = f"/models/{quote((yield from self._named(name, deadline)), safe='')}"
        if version is not None:
            path += f"/versions/{quote(str(version), safe='')}"
        return (
            yield from self._get(
                f"{path}/samples?limit={MOST_SAMPLES}", model_info.samples, deadline
            )
        )

    def ready(self, timeout: float | None) -> Steps[bool]:
        """Not tried again: who asks wants to know now."""
        deadline = self._deadline(timeout)
        try:
            yield from self._exchange(
                lambda: self._get_message("/readyz", deadline), deadline, retries=0
            )
        except (Unavailable, DeadlineExceeded):
            return False
        return True

    # --- rows, in parts ----------------------------------------------------------------------

    def _answers(self, query: Query, whole: Rows, deadline: Deadline) -> Steps[Answer]:
        """In as many requests as the server wants."""
        parts = self._limits.split(whole, query.k)
        if len(parts) == 1:
            try:
                return (yield from self._ask(query, whole, deadline))
            except PartTooLarge as refusal:
                if len(whole) == 1:
                    raise
                self._limits.learn(refusal, whole, query.k)
                return (yield from self._answers(query, whole, deadline))
        first = yield from self._answers(query, parts[0], deadline)
        # A new version may come meanwhile, and one answer must be of one version.
        pinned = query._replace(model=first.model, version=first.version)
        rest = yield Together([self._answers(pinned, part, deadline) for part in parts[1:]])
        return answers.joined([first, *rest])

    def _ask(self, query: Query, part: Rows, deadline: Deadline) -> Steps[Answer]:
        header, data = body(part)
        wanted = JSON if query.labels else NPY

        def message() -> bytes:
            head = (
                f"POST {self._where.prefix}{query.path}{self._lines}"
                f"Content-Type: {NPY}\r\nAccept: {wanted}\r\n{self._timeout_line(deadline)}"
                f"Content-Length: {len(header) + data.nbytes}\r\n\r\n"
            )
            return b"".join((head.encode(), header, data))

        reply = yield from self._exchange(message, deadline)
        return answers.read(reply, len(part), named=query.labels)

    # --- facts -------------------------------------------------------------------------------

    def _named(self, name: str | None, deadline: Deadline) -> Steps[str]:
        """The model that is meant: the one named, the client's, or the server's default."""
        name = name or self._model
        if name is not None:
            return name
        for model in (yield from self._get("/models", model_info.models, deadline)):
            if model.default:
                return str(model.name)
        raise QueryRefused("The server has no default model: name one.")

    def _get(self, path: str, read: Callable[[Any], T], deadline: Deadline) -> Steps[T]:
        reply = yield from self._exchange(lambda: self._get_message(path, deadline), deadline)
        try:
            return read(orjson.loads(reply.body))
        except (ValueError, KeyError, TypeError) as error:
            raise AnswerMalformed(f"{self._where.url}{path} has other facts than this.") from error

    def _get_message(self, path: str, deadline: Deadline) -> bytes:
        head = f"GET {self._where.prefix}{path}{self._lines}Accept: {JSON}\r\n"
        return f"{head}{self._timeout_line(deadline)}\r\n".encode()

    # --- trying ------------------------------------------------------------------------------

    def _exchange(
        self, message: Callable[[], bytes], deadline: Deadline, retries: int | None = None
    ) -> Steps[Reply]:
        """A reply with status 200. What is asked changes nothing, so it may be asked again."""
        retries = self._retries if retries is None else retries
        tries, fresh = 0, False
        while True:
            if self._left(deadline) <= 0:
                raise deadline.is_over()
            outcome: Reply | ClientError = yield Send(message(), deadline, fresh)
            asked_to_wait = 0.0
            if isinstance(outcome, ClientError):
                failure = outcome
            elif outcome.status == 200:
                return outcome
            else:
                failure = self._failure(outcome)
                asked_to_wait = error_mapping.retry_after(outcome, self._clock.time_of_day())
            fresh = isinstance(failure, Dropped) and failure.reused
            if fresh:
                continue  # the server had closed an idle connection: nothing is wrong
            tries += 1
            failure.tries = tries
            if not isinstance(failure, error_mapping.WORTH_ANOTHER_TRY) or tries > retries:
                raise failure
            longest = min(FIRST_PAUSE * 2 ** (tries - 1), LONGEST_PAUSE)
            pause = asked_to_wait + self._clock.chance() * longest
            if pause >= self._left(deadline):
                raise failure  # the next try would come too late
            yield Pause(pause)

    def _failure(self, reply: Reply) -> ClientError:
        return error_mapping.failure(reply, self._where, with_key=self._has_key)

    def _deadline(self, timeout: float | None) -> Deadline:
        seconds = self._timeout if timeout is None else _positive(timeout)
        return Deadline(self._clock.monotonic() + seconds, seconds)

    def _left(self, deadline: Deadline) -> float:
        return deadline.at - self._clock.monotonic()

    def _timeout_line(self, deadline: Deadline) -> str:
        """How long the answer is of use. In two digits, so that requests have the same few heads,
        which the server knows by heart; never less than is left."""
        left = max(self._left(deadline), 1e-3)
        unit = 10.0 ** (math.floor(math.log10(left)) - 1)
        return f"DSS-Timeout: {math.ceil(left / unit - 1e-9) * unit:g}\r\n"


def _count(name: str, value: int, least: int = 1) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise QueryRefused(f"{name} must be a whole number, not {value!r:.40}.") from None
    if number < least:
        raise QueryRefused(f"{name} is {number}; it must be at least {least}.")
    return number


def _positive(timeout: float) -> float:
    if not 0.0 < timeout <= 1e6:
        raise QueryRefused(f"timeout is {timeout:g}; it must be a positive number of seconds.")
    return float(timeout)
