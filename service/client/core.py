"""Requests, retries, parts and deadlines of both clients, without I/O.

A method is a generator: it yields the next step (send, pause, run these together) and is sent the
result. `Client` and `AsyncClient` take the steps, so the logic exists once, and tests need neither
servers nor sleep.
"""

import math
import operator
import os
import random
import re
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import orjson
from numpy.typing import ArrayLike

from service.client import answers, error_mapping, model_info
from service.client.address import Address
from service.client.answers import JSON, NPY, Answer
from service.client.deadline import Deadline
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
from service.client.http1 import Reply, ReplyLimits
from service.client.model_info import ExpertInfo, ModelInfo
from service.client.rows import PartLimits, Rows, body, rows

T = TypeVar("T")
Version = int | str  # a number or an alias

MOST_SAMPLES = 64  # in one reply of a server
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds; a random share of it is waited
KEY_VARIABLE = "DSS_API_KEY"
HEADER_VALUE = re.compile(r"[!-~]+")


class Send(NamedTuple):
    """Send a message; a Reply or a ClientError comes back."""

    message: bytes
    deadline: Deadline
    fresh: bool  # on a new connection


class Pause(NamedTuple):
    seconds: float


class Together(NamedTuple):
    """Run all of these, several at once if the client can; their results come back in order."""

    parts: Sequence["Steps[Answer]"]


Steps = Generator[Send | Pause | Together, Any, T]


class Query(NamedTuple):
    model: str | None  # None: the server's default
    version: Version | None  # None: the model's default
    k: int | None  # None: the server's default
    mode: str  # experts, exact, recall or rescore, as the query string has them; empty: its default
    labels: bool

    @property
    def path(self) -> str:
        path = "" if self.model is None else f"/models/{quote(self.model, safe='')}"
        if self.version is not None:
            path += f"/versions/{quote(str(self.version), safe='')}"
        asked = [part for part in ("" if self.k is None else f"k={self.k}", self.mode) if part]
        return f"{path}/topk{'?' if asked else ''}{'&'.join(asked)}"


@dataclass
class Clock:
    """The sources of time and chance, which tests replace."""

    monotonic: Callable[[], float] = time.monotonic
    time_of_day: Callable[[], float] = time.time
    chance: Callable[[], float] = random.random


class Core:
    def __init__(
        self,
        address: Address,
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
        self._address = address
        self._model, self._version = model, version
        self._timeout = _positive(timeout)
        self._retries = _count("retries", retries, least=0)
        self._clock = clock or Clock()
        self._limits = PartLimits()
        key = (api_key or os.environ.get(KEY_VARIABLE, "")).strip()
        if key and not HEADER_VALUE.fullmatch(key):
            raise NotAuthorized("The API key has characters that a header cannot carry.")
        self._has_key = bool(key)
        self._lines = f" HTTP/1.1\r\nHost: {address.authority}\r\nUser-Agent: dss-client\r\n" + (
            f"Authorization: Bearer {key}\r\n" if key else ""
        )

    # --- the clients' methods ----------------------------------------------------------------

    def topk(
        self,
        hidden: ArrayLike,
        k: int | None,
        experts: int | None,
        model: str | None,
        version: Version | None,
        labels: bool,
        timeout: float | None,
        *,
        exact: bool = False,
        recall: float | None = None,
        rescore: bool = False,
    ) -> Steps[Answer]:
        if model is None:
            model = self._model
            version = self._version if version is None else version
        if version is not None and model is None:
            raise QueryRefused("A version needs its model's name: pass model= as well.")
        k = None if k is None else _count("k", k)
        query = Query(model, version, k, _mode(experts, exact, recall, rescore), labels)
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
        """Asked once: the caller wants to know the state now."""
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
        """In as many requests as the server's limits need."""
        parts = self._limits.split(whole, query.k, query.mode)
        if len(parts) == 1:
            try:
                return (yield from self._ask(query, whole, deadline))
            except PartTooLarge as refusal:
                if len(whole) == 1:
                    raise
                self._limits.learn(refusal, whole, query.k, query.mode)
                return (yield from self._answers(query, whole, deadline))
        first = yield from self._answers(query, parts[0], deadline)
        # The default version may change between parts, but one answer must come from one version.
        pinned = query._replace(model=first.model, version=first.version)
        rest = yield Together([self._answers(pinned, part, deadline) for part in parts[1:]])
        return answers.joined([first, *rest])

    def _ask(self, query: Query, part: Rows, deadline: Deadline) -> Steps[Answer]:
        header, data = body(part)
        accepted = JSON if query.labels else NPY

        def message() -> bytes:
            head = (
                f"POST {self._address.prefix}{query.path}{self._lines}"
                f"Content-Type: {NPY}\r\nAccept: {accepted}\r\n{self._timeout_line(deadline)}"
                f"Content-Length: {len(header) + data.nbytes}\r\n\r\n"
            )
            return b"".join((head.encode(), header, data))

        reply = yield from self._exchange(message, deadline)
        return answers.read(reply, len(part), named=query.labels)

    # --- models, experts, samples ------------------------------------------------------------

    def _named(self, name: str | None, deadline: Deadline) -> Steps[str]:
        """The given name, or else the client's model, or else the server's default."""
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
            raise AnswerMalformed(
                f"{self._address.url}{path} does not answer with the JSON of this API."
            ) from error

    def _get_message(self, path: str, deadline: Deadline) -> bytes:
        head = f"GET {self._address.prefix}{path}{self._lines}Accept: {JSON}\r\n"
        return f"{head}{self._timeout_line(deadline)}\r\n".encode()

    # --- retries -----------------------------------------------------------------------------

    def _exchange(
        self, message: Callable[[], bytes], deadline: Deadline, retries: int | None = None
    ) -> Steps[Reply]:
        """A reply with status 200. No request changes anything, so each may be sent again."""
        retries = self._retries if retries is None else retries
        tries, fresh = 0, False
        while True:
            if self._left(deadline) <= 0:
                raise deadline.exceeded()
            outcome: Reply | ClientError = yield Send(message(), deadline, fresh)
            retry_after = 0.0
            if isinstance(outcome, ClientError):
                failure = outcome
            elif outcome.status == 200:
                return outcome
            else:
                failure = self._failure(outcome)
                retry_after = error_mapping.retry_after(outcome, self._clock.time_of_day())
            fresh = isinstance(failure, Dropped) and failure.reused
            if fresh:
                continue  # servers may close idle connections: this is no failed try
            tries += 1
            failure.tries = tries
            if not isinstance(failure, error_mapping.RETRIED) or tries > retries:
                raise failure
            longest = min(FIRST_PAUSE * 2 ** (tries - 1), LONGEST_PAUSE)
            pause = retry_after + self._clock.chance() * longest
            if pause >= self._left(deadline):
                raise failure  # the next try would begin after the deadline
            yield Pause(pause)

    def _failure(self, reply: Reply) -> ClientError:
        return error_mapping.status_error(reply, self._address, with_key=self._has_key)

    def _deadline(self, timeout: float | None) -> Deadline:
        seconds = self._timeout if timeout is None else _positive(timeout)
        return Deadline(self._clock.monotonic() + seconds, seconds)

    def _left(self, deadline: Deadline) -> float:
        return deadline.at - self._clock.monotonic()

    def _timeout_line(self, deadline: Deadline) -> str:
        """Tells the server how long the answer is of use; never less than is left. Two digits, so
        that requests have few different request heads: the server caches those it has parsed."""
        left = max(self._left(deadline), 1e-3)
        unit = 10.0 ** (math.floor(math.log10(left)) - 1)
        return f"DSS-Timeout: {math.ceil(left / unit - 1e-9) * unit:g}\r\n"


def reply_limits(head_bytes: int, body_bytes: int) -> ReplyLimits:
    return ReplyLimits(_count("max_head_bytes", head_bytes), _count("max_body_bytes", body_bytes))


def _count(name: str, value: int, least: int = 1) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise QueryRefused(f"{name} must be a whole number, not {value!r:.40}.") from None
    if number < least:
        raise QueryRefused(f"{name} is {number}; it must be at least {least}.")
    return number


def _mode(experts: int | None, exact: bool, recall: float | None, rescore: bool) -> str:
    """As a query string has it. What does not go together the server says."""
    asked = [] if experts is None else [f"experts={_count('experts', experts)}"]
    if recall is not None:
        if isinstance(recall, bool) or not isinstance(recall, Real):
            raise QueryRefused(f"recall must be a number, not {recall!r:.40}.")
        asked.append(f"recall={float(recall)!r}")
    for name, on in (("exact", exact), ("rescore", rescore)):
        if not isinstance(on, bool):
            raise QueryRefused(f"{name} must be True or False, not {on!r:.40}.")
        asked += [f"{name}=true"] if on else []
    return "&".join(asked)


def _positive(timeout: float) -> float:
    if not 0.0 < timeout <= 1e6:
        raise QueryRefused(f"timeout is {timeout:g}; it must be a positive number of seconds.")
    return float(timeout)
