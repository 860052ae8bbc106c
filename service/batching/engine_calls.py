"""Calls an engine for one or several requests, times each call and reports it.

The event loop and the threads make calls, at the same time too. A thread whose call was given up
may come back: `report` says whether a call counts.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from service.batching.cost import RowCost
from service.batching.queue import BatchKey, Job
from service.batching.sliced_call import SlicedCall
from service.errors import DSSError
from service.topk import (
    Answer,
    Answered,
    Call,
    DeadlineExceeded,
    EngineFailed,
    Mode,
    Observer,
    TopK,
    TopKEngine,
)

logger = logging.getLogger(__name__)

PROBE = BatchKey(1, 1, counted=False)  # of the row that shows whether an engine answers
WARM_ROWS = 32
NEVER = float("inf")

Rows = NDArray[np.float32]  # [B,D]
Sampler = Callable[[Rows, int, int, Mode], None]  # is shown rows, and the k, experts and mode asked
Report = Callable[[BatchKey, Rows, Sequence[float], float, TopK], None]
Outcome = Answered | DSSError


class EngineCalls:
    def __init__(
        self,
        engine: TopKEngine,
        cost: RowCost,
        *,
        name: str,
        observer: Observer,
        sampler: Sampler | None = None,
    ) -> None:
        self.name = name
        self.probe_row = np.zeros((1, engine.hidden_size), np.float32)
        self._probe_classes: NDArray[np.int64] | None = None  # what it was answered at first
        self._engine = engine
        self._cost = cost
        self._observer = observer
        self._sampler = sampler
        self._reporting = threading.Lock()

    def warm(self, rows: Rows, k: int) -> None:
        """Before the first request: touch the memory, learn what a row costs, and remember what
        the first of these rows is answered."""
        rows = np.resize(rows, (WARM_ROWS, rows.shape[1]))
        self._engine.topk(rows, k)
        for batch in (rows, rows[:1]):
            started = perf_counter()
            self._engine.topk(batch, k)
            self._cost.learn(BatchKey(k, 1), len(batch), perf_counter() - started)
        if self._engine.can_exact:
            self._warm_scan(rows, k)
        # With the probe's own k: for more answers further experts are searched, and one of those
        # may hold a better class.
        self.probe_row = rows[:1].copy()
        self._probe_classes = self._engine.topk(self.probe_row, PROBE.k).classes

    def _warm_scan(self, rows: Rows, k: int) -> None:
        """The same for exact answers, a few rows only: a scan of a large head takes long."""
        key = BatchKey(k, 1, mode=Mode(exact=True))
        for _ in range(2):
            started = perf_counter()
            self._engine.topk(rows[:1], k, 1, key.mode)
            self._cost.learn(key, 1, perf_counter() - started)

    def is_first_answer(self, answer: Answered) -> bool:
        """Whether the probe row is answered as it was at first."""
        return self._probe_classes is None or np.array_equal(answer.classes, self._probe_classes)

    def job(self, hidden: Rows, key: BatchKey, deadline: float = NEVER) -> Job:
        """A request that waits from now on, with what it is expected to cost."""
        future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        seconds = most_seconds = self._cost.typical(key, len(hidden))
        if key.mode.recall is not None:
            most_seconds = self._cost.most(key, len(hidden))
        return Job(hidden, key, future, perf_counter(), deadline, seconds, most_seconds)

    def sliced(self, job: Job) -> SlicedCall:
        return SlicedCall(self._engine, job)

    def learn(self, key: BatchKey, rows: int, seconds: float) -> None:
        with self._reporting:
            self._cost.learn(key, rows, seconds)

    def compute(self, hidden: Rows, key: BatchKey, waits: Sequence[float], report: Report) -> TopK:
        k, experts, _, mode = key
        started = perf_counter()
        result = self._engine.topk(hidden, k, experts, mode)
        report(key, hidden, waits, perf_counter() - started, result)
        return result

    def report(
        self, key: BatchKey, hidden: Rows, waits: Sequence[float], seconds: float, result: TopK
    ) -> None:
        """Learn from a call and count it, before anybody has an answer: a client that has one
        finds it counted."""
        with self._reporting:
            self._cost.learn(key, len(hidden), seconds)
            self._count(key, hidden, waits, seconds, result)

    def _count(
        self, key: BatchKey, hidden: Rows, waits: Sequence[float], seconds: float, result: TopK
    ) -> None:
        k, experts, counted, mode = key
        if counted:
            self._observer.executed(waits, len(hidden), seconds, result)
            if result.rungs is not None:
                self._observer.answered(mode, result.rungs)
            if self._sampler is not None:
                self._sampler(hidden, k, experts, mode)

    def run(self, batch: Sequence[Job], report: Report) -> list[Outcome]:
        """Answer jobs of one key by one call, in their order.

        A job whose client is gone, or would have its answer too late, is not computed.
        """
        now = perf_counter()
        is_wanted = [not job.future.done() and job.deadline > now for job in batch]
        wanted = list(compress(batch, is_wanted))
        if not wanted:
            return [late() for _ in batch]
        waits = [now - job.queued for job in wanted]
        hidden = wanted[0].hidden
        if len(wanted) > 1:
            hidden = np.concatenate([job.hidden for job in wanted])
        result = self.compute(hidden, wanted[0].key, waits, report)
        shares = _shares(result, wanted, started=now)
        return [next(shares) if answered else late() for answered in is_wanted]

    def failures(self, batch: Sequence[Job], error: BaseException) -> list[Outcome]:
        """The outcome of jobs whose call raised an error."""
        self.log_failure(error, len(batch))
        return [self.failed() for _ in batch]

    def log_failure(self, error: BaseException, requests: int) -> None:
        logger.error("The engine of %s failed on %d requests.", self.name, requests, exc_info=error)

    def failed(self) -> EngineFailed:
        return EngineFailed(f"Model {self.name} failed to compute an answer.")


def late() -> DeadlineExceeded:
    return DeadlineExceeded("The answer could not be given in time.")


def settle(batch: Sequence[Job], outcomes: Sequence[Outcome]) -> None:
    """Give each job its answer or its error. Only the event loop may."""
    for job, outcome in zip(batch, outcomes, strict=True):
        if job.future.done():
            continue
        if isinstance(outcome, DSSError):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)


def _shares(result: TopK, jobs: Sequence[Job], started: float) -> Iterator[Answer]:
    """Each job's rows of the answer to all of them."""
    call = Call(started, perf_counter(), result.gate_seconds, result.expert_seconds)
    first = 0
    for job in jobs:
        rows = slice(first, first + len(job.hidden))
        first = rows.stop
        yield Answer(
            result.classes[rows],
            result.log_probs[rows],
            result.experts[rows],
            result.gates[rows],
            call,
            None if result.searched is None else result.searched[rows],
            None if result.rungs is None else result.rungs[rows],
        )
