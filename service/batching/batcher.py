"""Joins concurrent requests into one engine call, without a thread if the call will be short.

All requests that the event loop reads in one turn are joined at its end, if they have the same k,
experts and mode. A call that will be short is computed right there: handing it to a thread and back
would cost more than it. A call that may take longer goes to a thread; what arrives meanwhile waits,
and is joined when the thread is free. No timer delays anything. A request that alone takes longer
than a joined call may is computed apart, in slices, so that the others do not wait for it.

A request that is alone, as far as the turn before can tell, does not even wait for its turn's end.

What would have to wait too long is refused at once.
"""

import asyncio
import logging
from time import perf_counter

from service.batching.cost import RowCost
from service.batching.engine_calls import NEVER, PROBE, EngineCalls, Rows, Sampler, late
from service.batching.lane import STUCK_SECONDS, Lane
from service.batching.long_lane import LongLane
from service.batching.queue import BatchKey, QueueLimits, batch_key
from service.batching.short_lane import ShortLane
from service.batching.threads import EngineThreads
from service.errors import DSSError, QueryError
from service.topk import (
    SPARSE,
    Answered,
    EngineStopped,
    Mode,
    Observer,
    QueueFull,
    TopKEngine,
)

logger = logging.getLogger(__name__)

INLINE_SECONDS = 0.001  # by how long a call may hold up the event loop
BATCH_SECONDS = 0.01  # by how long requests may hold up one that they are joined with
NO_WAIT = (0.0,)
HEALTH_SECONDS = 1.0  # how long the engine may take to answer a row


class Batcher:
    """One model's queues and engine. Called on the event loop alone."""

    def __init__(
        self,
        engine: TopKEngine,
        *,
        name: str,
        observer: Observer,
        threads: EngineThreads,
        limits: QueueLimits,
        max_batch_rows: int,
        max_batch_seconds: float = BATCH_SECONDS,
        sampler: Sampler | None = None,
        inline_seconds: float = INLINE_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        self._engine = engine
        self._name = name
        self._limits = limits
        self._inline_seconds = inline_seconds
        self._max_batch_seconds = max_batch_seconds
        self._cost = RowCost(engine.row_scores)
        self._calls = EngineCalls(engine, self._cost, name=name, observer=observer, sampler=sampler)
        lane = (self._calls, self._cost, limits)
        self._short = ShortLane(
            *lane,
            threads.short,
            max_batch_rows=max_batch_rows,
            max_batch_seconds=max_batch_seconds,
            inline_seconds=inline_seconds,
            stuck_seconds=stuck_seconds,
        )
        self._long = LongLane(*lane, threads.long, stuck_seconds=stuck_seconds)
        self._arrivals = 0  # in this turn
        self._joining = False  # there are others in this turn, or were in the one before

    @property
    def queued_rows(self) -> int:
        return self._short.rows + self._long.rows

    @property
    def alive(self) -> bool:
        """False once the engine has failed in thread after thread: then only a restart helps."""
        return self._short.alive and self._long.alive

    def warm(self, rows: Rows, k: int) -> None:
        """Before the first request: touch the memory, learn what a row costs, and remember what
        the first of these rows is answered."""
        self._calls.warm(rows, k)

    def admit(self) -> None:
        """Raise QueueFull if a thread is busy and there is no room for even one row."""
        if self._short.busy and not self._short.has_room(1, 0, perf_counter()):
            raise self._full()

    async def topk(self, hidden: Rows, k: int, experts: int = 1, mode: Mode = SPARSE) -> Answered:
        """The answer to one request."""
        answer = self.ask(hidden, k, experts, mode)
        return await answer if isinstance(answer, asyncio.Future) else answer

    def ask(
        self,
        hidden: Rows,
        k: int,
        experts: int = 1,
        mode: Mode = SPARSE,
        deadline: float = NEVER,
    ) -> "Answered | asyncio.Future[Answered]":
        """The answer to one request if it can be computed at once, or else a future of it.

        Arrays are checked before they are joined, so a wrong request fails no other one.
        """
        key = batch_key(k, experts, True, mode)
        if self._joining or self._short.busy or not self._is_short(key, len(hidden)):
            self._engine.check(hidden, k, experts, mode)
            return self._enqueue(self._lane(key, len(hidden)), hidden, key, deadline)
        self._arrived()
        try:
            return self._calls.compute(hidden, key, NO_WAIT, self._calls.report)
        except QueryError:
            raise
        except BaseException as error:
            self._calls.log_failure(error, requests=1)
            raise self._calls.failed() from error

    async def healthy(self) -> bool:
        """Whether the engine answers a row, and as it did at first."""
        if self._short.failed or self._long.failed or not self.alive:
            return False
        try:
            future = self._enqueue(self._short, self._calls.probe_row, PROBE)
            answer = await asyncio.wait_for(future, HEALTH_SECONDS)
        except (DSSError, TimeoutError):
            return False
        if self._calls.is_first_answer(answer):
            return True
        logger.error("The engine of %s answers a known row differently than at first.", self._name)
        return False

    async def close(self) -> None:
        """Answer everything that waits."""
        self._short.stop()
        self._long.stop()
        await self._short.drain()
        await self._long.drain()

    # --- joining -----------------------------------------------------------------------------

    def _is_short(self, key: BatchKey, rows: int) -> bool:
        """Whether so many rows will not hold up the event loop; not if nobody knows yet."""
        return (
            self._cost.fastest(key, rows) <= self._inline_seconds
            and rows <= self._limits.rows
            and not self._short.failed
        )

    def _lane(self, key: BatchKey, rows: int) -> Lane:
        is_long = self._cost.most(key, rows) > self._max_batch_seconds
        return self._long if is_long else self._short

    def _arrived(self) -> None:
        self._arrivals += 1
        self._joining = True
        if self._arrivals == 1:
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._joining = self._arrivals > 1  # as many may come in the next turn
        self._arrivals = 0
        self._short.compute_queue()
        self._long.compute_queue()

    # --- admission ---------------------------------------------------------------------------

    def _enqueue(
        self, lane: Lane, hidden: Rows, key: BatchKey, deadline: float = NEVER
    ) -> "asyncio.Future[Answered]":
        job = self._calls.job(hidden, key, deadline)
        if lane.stopping:
            raise EngineStopped(f"Model {self._name} takes no more requests.")
        if key is not PROBE:  # which must not be refused because others wait
            if lane.failed:
                raise self._calls.failed()
            if not lane.has_room(len(hidden), hidden.nbytes, job.queued):
                raise self._full()
            if self._cost.least(key, len(hidden)) > deadline - job.queued:
                raise late()
        lane.add(job)
        self._arrived()
        return job.future

    def _full(self) -> QueueFull:
        return QueueFull(f"Model {self._name} has as much waiting as it can hold; try again soon.")
