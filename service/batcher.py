"""Joins concurrent requests into one engine call, and asks no thread for help if it need not.

All requests that the event loop reads in one turn are joined at its end, if they have the same k
and experts. A call that will be short is computed right there: handing it to a thread and back
would cost more than it. A call that may be long goes to the engine's thread; what arrives
meanwhile waits, and is joined when the thread is free. No timer delays anything.

A request that is alone, as far as the turn before can tell, does not even wait for its turn's end.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from service.backend import TopK
from service.errors import DSSError, QueryError

logger = logging.getLogger(__name__)

INLINE_SECONDS = 0.001  # what the event loop may be held up by a call
RECENT = 0.2  # the weight of a slow call in what a row is expected to cost
KINDS_KEPT = 1024  # clients choose k and experts, so what is known of them is bounded
UNKNOWN_SECONDS = 1.0  # a row's cost before any call: too long for the event loop
NO_WAIT = (0.0,)


class QueueFull(DSSError):
    """More rows are waiting than the queue holds."""


class EngineFailed(DSSError):
    """The engine raised something that is not the client's fault."""


class EngineStopped(DSSError):
    """The engine takes no more requests: it is being closed, or has died."""


class TopKEngine(Protocol):
    """What the HTTP side needs of an engine."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def n_reachable(self) -> int: ...
    def check(self, hidden: NDArray[np.generic], k: int, experts: int = 1) -> None:
        """Raise the QueryError that `topk` would."""

    def topk(self, hidden: NDArray[np.float32], k: int, experts: int = 1) -> TopK: ...


class Observer(Protocol):
    def executed(self, waits: Sequence[float], rows: int, seconds: float, result: TopK) -> None:
        """An engine call answered len(waits) requests, which had waited that many seconds.

        Never called by two threads at once.
        """


class Answer(NamedTuple):
    """One request's share of an engine call."""

    classes: NDArray[np.int64]  # [B,k]
    log_probs: NDArray[np.float32]  # [B,k]
    experts: NDArray[np.int64]  # [B]
    gates: NDArray[np.float32]  # [B]


Answered = Answer | TopK
Kind = tuple[int, int, bool]  # k, experts, counted; jobs of one kind may be joined


class Job(NamedTuple):
    hidden: NDArray[np.float32]  # [B,D]
    kind: Kind
    future: "asyncio.Future[Answered]"
    queued: float


class Batcher:
    def __init__(
        self,
        engine: TopKEngine,
        *,
        name: str,
        max_queue_rows: int,
        max_batch_rows: int,
        observer: Observer,
        inline_seconds: float = INLINE_SECONDS,
    ) -> None:
        self._engine = engine
        self._name = name
        self._max_queue_rows = max_queue_rows
        self._max_batch_rows = max_batch_rows
        self._observer = observer
        self._inline_seconds = inline_seconds

        # Only the event loop touches these.
        self._arrivals = 0  # in this turn
        self._joining = False  # there are others in this turn, or were in the one before

        # Both threads touch these, under the lock of `_wake`. Waiting jobs are kept by what they
        # may be joined with: the first kind is served next and goes to the end of the line if jobs
        # are left, so that no kind can starve another.
        self._wake = threading.Condition(threading.Lock())
        self._waiting: dict[Kind, deque[Job]] = {}
        self._queued_rows = 0
        self._stopping = False

        # Whoever computes owns the rest: the engine's thread from when the event loop sets
        # `_handed_over` until the thread clears it, and the event loop otherwise.
        self._handed_over = False
        self._failing = False
        self._dead = False
        self._row_seconds: dict[Kind, float] = {}  # what a row is expected to cost
        self._thread = threading.Thread(target=self._work, name=f"engine {name}", daemon=True)
        self._thread.start()

    @property
    def queued_rows(self) -> int:
        return self._queued_rows

    @property
    def alive(self) -> bool:
        """False once the engine has died; only a restart helps then."""
        return self._thread.is_alive() and not self._dead

    async def topk(self, hidden: NDArray[np.float32], k: int, experts: int = 1) -> Answered:
        """The answer to one request."""
        answer = self.ask(hidden, k, experts)
        return await answer if isinstance(answer, asyncio.Future) else answer

    def ask(
        self, hidden: NDArray[np.float32], k: int, experts: int = 1
    ) -> "Answered | asyncio.Future[Answered]":
        """The answer to one request at once if the engine can give it, or else when it will come.

        The arrays are checked here, alone: a wrong request never joins, so it fails no neighbour.
        """
        kind = (k, experts, True)
        if self._joining or self._handed_over or not self._is_short(kind, len(hidden)):
            self._engine.check(hidden, k, experts)
            return self._enqueue(hidden, kind)
        self._arrived()
        try:
            return self._compute(hidden, kind, NO_WAIT)
        except QueryError:
            raise
        except BaseException as error:
            raise self._failure(error, requests=1) from error

    async def healthy(self) -> bool:
        """Whether the engine answers. After a failed call one row of zeros is tried anew."""
        if not self.alive:
            return False
        if not self._failing:
            return True
        zeros = np.zeros((1, self._engine.hidden_size), np.float32)
        try:
            await self._enqueue(zeros, (1, 1, False))
        except DSSError:
            return False
        return True

    async def close(self) -> None:
        """Answer everything that waits, then end the thread."""
        self._stop()
        await asyncio.to_thread(self._thread.join)

    # --- the event loop's side ---------------------------------------------------------------

    def _is_short(self, kind: Kind, rows: int) -> bool:
        """Whether so many rows will not hold up the event loop; not if nobody knows yet."""
        seconds = rows * self._row_seconds.get(kind, UNKNOWN_SECONDS)
        return seconds <= self._inline_seconds and rows <= self._max_queue_rows

    def _arrived(self) -> None:
        self._arrivals += 1
        self._joining = True
        if self._arrivals == 1:
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._joining = self._arrivals > 1  # as many may come in the next turn
        self._arrivals = 0
        self._flush()

    def _flush(self) -> None:
        """Compute what waits, or hand it over."""
        while self._waiting and not self._handed_over:
            if self._waiting_is_short():
                _settle(*self._run(self._take()))
            else:
                with self._wake:
                    self._handed_over = True
                    self._wake.notify()

    def _told(self, jobs: list[Job], outcome: list[Answered] | DSSError) -> None:
        """The engine's thread has finished a call."""
        _settle(jobs, outcome)
        self._flush()

    def _enqueue(self, hidden: NDArray[np.float32], kind: Kind) -> "asyncio.Future[Answered]":
        future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        job = Job(hidden, kind, future, perf_counter())
        with self._wake:
            if self._stopping:
                raise self._stopped()
            if self._queued_rows + len(hidden) > self._max_queue_rows:
                raise QueueFull(
                    f"Model {self._name} has {self._queued_rows} rows waiting and room for"
                    f" {self._max_queue_rows}; try again soon."
                )
            self._waiting.setdefault(kind, deque()).append(job)
            self._queued_rows += len(hidden)
        self._arrived()
        return future

    # --- the engine's thread -----------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._wait():
                batch = self._take()
                done = self._run(batch)
                self._hand_back()
                _call(batch[0].future.get_loop(), self._told, *done)
        except BaseException:
            logger.critical("The engine's thread of %s died.", self._name, exc_info=True)
            self._die()

    def _wait(self) -> bool:
        """Whether there is something to do; False once there never will be."""
        with self._wake:
            while not (self._handed_over and self._waiting):
                if self._stopping:
                    return False
                self._wake.wait()
            return True

    def _hand_back(self) -> None:
        """What waits is the event loop's again, unless it would take long."""
        with self._wake:
            if not self._stopping and self._waiting_is_short():
                self._handed_over = False

    # --- whoever computes --------------------------------------------------------------------

    def _waiting_is_short(self) -> bool:
        rates = [self._row_seconds.get(kind, UNKNOWN_SECONDS) for kind in self._waiting]
        return self._queued_rows * max(rates, default=0.0) <= self._inline_seconds

    def _take(self) -> list[Job]:
        """The jobs of the next call."""
        with self._wake:
            kind = next(iter(self._waiting))
            jobs = self._waiting.pop(kind)
            batch = [jobs.popleft()]
            rows = len(batch[0].hidden)
            while jobs and rows + len(jobs[0].hidden) <= self._max_batch_rows:
                batch.append(jobs.popleft())
                rows += len(batch[-1].hidden)
            if jobs:
                self._waiting[kind] = jobs
            self._queued_rows -= rows
            return batch

    def _run(self, batch: list[Job]) -> tuple[list[Job], list[Answered] | DSSError]:
        # A request whose client is gone is not worth computing.
        wanted = [job for job in batch if not job.future.cancelled()]
        if not wanted:
            return [], []
        now = perf_counter()
        waits = [now - job.queued for job in wanted]
        try:
            if len(wanted) == 1:
                return wanted, [self._compute(wanted[0].hidden, wanted[0].kind, waits)]
            joined = np.concatenate([job.hidden for job in wanted])
            return wanted, _shares(self._compute(joined, wanted[0].kind, waits), wanted)
        except BaseException as error:
            return wanted, self._failure(error, requests=len(wanted))

    def _compute(self, hidden: NDArray[np.float32], kind: Kind, waits: Sequence[float]) -> TopK:
        k, experts, counted = kind
        started = perf_counter()
        result = self._engine.topk(hidden, k, experts)
        seconds = perf_counter() - started
        self._failing = False
        self._learn(kind, seconds / len(hidden))
        # Counted before anyone is told, so that a client that has its answer finds it counted.
        if counted:
            self._observer.executed(waits, len(hidden), seconds, result)
        return result

    def _learn(self, kind: Kind, row_seconds: float) -> None:
        known = self._row_seconds.get(kind)
        if known is not None:
            # Quick to fall, slow to rise: one slow call is the machine's doing.
            row_seconds = min(row_seconds, known + RECENT * (row_seconds - known))
        elif len(self._row_seconds) >= KINDS_KEPT:
            self._row_seconds.clear()
        self._row_seconds[kind] = row_seconds

    def _failure(self, error: BaseException, requests: int) -> EngineFailed:
        logger.error(
            "The engine of %s failed on %d requests.", self._name, requests, exc_info=error
        )
        self._failing = True
        if not isinstance(error, Exception):
            logger.critical("The engine of %s died.", self._name)
            self._die()
        return EngineFailed(f"Model {self._name} failed to compute an answer.")

    def _die(self) -> None:
        """Nobody may wait for an engine that has died."""
        self._dead = True
        with self._wake:
            left = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
            self._queued_rows = 0
        self._stop()
        if left:
            _call(left[0].future.get_loop(), _settle, left, self._stopped())

    def _stop(self) -> None:
        """Take no more requests; the thread answers what waits, and ends."""
        with self._wake:
            self._stopping = self._handed_over = True
            self._wake.notify()

    def _stopped(self) -> EngineStopped:
        return EngineStopped(f"Model {self._name} takes no more requests.")


def _shares(result: TopK, jobs: list[Job]) -> list[Answered]:
    shares: list[Answered] = []
    first = 0
    for job in jobs:
        rows = slice(first, first + len(job.hidden))
        shares.append(
            Answer(
                result.classes[rows],
                result.log_probs[rows],
                result.experts[rows],
                result.gates[rows],
            )
        )
        first = rows.stop
    return shares


def _call(
    loop: asyncio.AbstractEventLoop,
    tell: Callable[[list[Job], list[Answered] | DSSError], None],
    jobs: list[Job],
    outcome: list[Answered] | DSSError,
) -> None:
    """From whatever thread."""
    try:
        loop.call_soon_threadsafe(tell, jobs, outcome)
    except RuntimeError:
        logger.warning("%d answers came after the event loop had closed.", len(jobs))


def _settle(jobs: list[Job], outcome: list[Answered] | DSSError) -> None:
    """Only the event loop may tell those who wait."""
    for position, job in enumerate(jobs):
        if job.future.done():
            continue
        if isinstance(outcome, DSSError):
            job.future.set_exception(type(outcome)(*outcome.args))
        else:
            job.future.set_result(outcome[position])
