"""Joins concurrent requests into one engine call.

One thread owns the engine. A request that finds it idle runs at once; requests that arrive while
it is busy wait, and those with the same k and experts are then joined. No timer delays anything.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from service.backend import TopK
from service.errors import DSSError

logger = logging.getLogger(__name__)


class QueueFull(DSSError):
    """More rows are waiting than the queue holds."""


class EngineFailed(DSSError):
    """The engine raised something that is not the client's fault."""


class EngineStopped(DSSError):
    """The engine takes no more requests: it is being closed, or its thread has died."""


class TopKEngine(Protocol):
    """What the HTTP side needs of an engine."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def n_reachable(self) -> int: ...
    def check(self, hidden: NDArray[np.generic], k: int, experts: int = 1) -> None: ...
    def topk(self, hidden: NDArray[np.float32], k: int, experts: int = 1) -> TopK: ...


class Observer(Protocol):
    def executed(self, waits: Sequence[float], rows: int, seconds: float, result: TopK) -> None:
        """An engine call answered len(waits) requests, which had waited that many seconds."""


@dataclass(frozen=True)
class Answer:
    """One request's share of an engine call."""

    classes: NDArray[np.int64]  # [B,k]
    log_probs: NDArray[np.float32]  # [B,k]
    experts: NDArray[np.int64]  # [B]
    gates: NDArray[np.float32]  # [B]


Kind = tuple[int, int, bool]  # jobs of one kind may be joined


@dataclass(frozen=True, eq=False)
class Job:
    hidden: NDArray[np.float32]  # [B,D]
    k: int
    experts: int
    future: "asyncio.Future[Answer]"
    queued: float
    counted: bool  # False for the batcher's own check, which is no traffic

    @property
    def kind(self) -> Kind:
        return self.k, self.experts, self.counted


class Batcher:
    def __init__(
        self,
        engine: TopKEngine,
        *,
        name: str,
        max_queue_rows: int,
        max_batch_rows: int,
        observer: Observer,
    ) -> None:
        self._engine = engine
        self._name = name
        self._max_queue_rows = max_queue_rows
        self._max_batch_rows = max_batch_rows
        self._observer = observer
        self._wake = threading.Condition()
        # Waiting jobs by what they may be joined with. The first kind is served next and goes to
        # the end of the line if jobs are left, so that no kind can starve another.
        self._waiting: dict[Kind, deque[Job]] = {}
        self._queued_rows = 0
        self._stopping = False
        self._failing = False
        self._thread = threading.Thread(target=self._work, name=f"engine {name}", daemon=True)
        self._thread.start()

    @property
    def queued_rows(self) -> int:
        return self._queued_rows

    @property
    def alive(self) -> bool:
        """False once the engine's thread has ended; only a restart helps then."""
        return self._thread.is_alive()

    async def topk(self, hidden: NDArray[np.float32], k: int, experts: int = 1) -> Answer:
        """The answer to one request.

        The arrays are checked here, alone: a wrong request never joins, so it fails no neighbour.
        """
        self._engine.check(hidden, k, experts)
        return await self._submit(hidden, k, experts, counted=True)

    async def healthy(self) -> bool:
        """Whether the engine answers. After a failed call one row of zeros is tried anew."""
        if not self.alive:
            return False
        if not self._failing:
            return True
        zeros = np.zeros((1, self._engine.hidden_size), np.float32)
        try:
            await self._submit(zeros, k=1, experts=1, counted=False)
        except DSSError:
            return False
        return True

    async def close(self) -> None:
        """Answer everything that waits, then end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    async def _submit(
        self, hidden: NDArray[np.float32], k: int, experts: int, *, counted: bool
    ) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        job = Job(hidden, k, experts, future, perf_counter(), counted)
        with self._wake:
            if self._stopping:
                raise EngineStopped(f"Model {self._name} takes no more requests.")
            if self._queued_rows + len(hidden) > self._max_queue_rows:
                raise QueueFull(
                    f"Model {self._name} has {self._queued_rows} rows waiting and room for"
                    f" {self._max_queue_rows}; try again soon."
                )
            self._waiting.setdefault(job.kind, deque()).append(job)
            self._queued_rows += len(hidden)
            self._wake.notify()
        return await future

    # --- the engine's thread -----------------------------------------------------------------

    def _work(self) -> None:
        try:
            while batch := self._next_batch():
                self._run(batch)
        except BaseException:
            logger.critical("The engine thread of %s died.", self._name, exc_info=True)
        finally:
            self._abandon()

    def _next_batch(self) -> list[Job]:
        """The jobs of the next call; none once the batcher is closed and everything is answered."""
        with self._wake:
            while not self._waiting:
                if self._stopping:
                    return []
                self._wake.wait()
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

    def _run(self, batch: list[Job]) -> None:
        # A request whose client is gone is not worth computing.
        wanted = [job for job in batch if not job.future.cancelled()]
        if not wanted:
            return
        try:
            answers = self._answers(wanted)
        except BaseException as error:
            logger.exception("The engine of %s failed on %d requests.", self._name, len(wanted))
            self._failing = True
            _settle(wanted, EngineFailed(f"Model {self._name} failed to compute an answer."))
            if not isinstance(error, Exception):
                raise
        else:
            self._failing = False
            _settle(wanted, answers)

    def _answers(self, batch: list[Job]) -> list[Answer]:
        joined = batch[0].hidden
        if len(batch) > 1:
            joined = np.concatenate([job.hidden for job in batch])
        started = perf_counter()
        result = self._engine.topk(joined, batch[0].k, batch[0].experts)
        seconds = perf_counter() - started
        # Counted before anyone is told, so that a client that has its answer finds it counted.
        if batch[0].counted:
            waits = [started - job.queued for job in batch]
            self._observer.executed(waits, len(joined), seconds, result)
        answers = []
        first = 0
        for job in batch:
            rows = slice(first, first + len(job.hidden))
            first = rows.stop
            answers.append(
                Answer(
                    result.classes[rows],
                    result.log_probs[rows],
                    result.experts[rows],
                    result.gates[rows],
                )
            )
        return answers

    def _abandon(self) -> None:
        """Nobody may wait for a thread that has ended."""
        with self._wake:
            self._stopping = True
            left = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
            self._queued_rows = 0
        _settle(left, EngineStopped(f"Model {self._name} takes no more requests."))


def _settle(jobs: list[Job], outcome: list[Answer] | DSSError) -> None:
    """Hand results to the event loop in one go."""
    if not jobs:
        return

    def settle() -> None:
        for position, job in enumerate(jobs):
            if job.future.done():
                continue
            if isinstance(outcome, DSSError):
                job.future.set_exception(type(outcome)(*outcome.args))
            else:
                job.future.set_result(outcome[position])

    try:
        jobs[0].future.get_loop().call_soon_threadsafe(settle)
    except RuntimeError:
        logger.warning("%d answers came after the event loop had closed.", len(jobs))
