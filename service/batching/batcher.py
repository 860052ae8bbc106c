"""Joins concurrent requests into one engine call, and asks no thread for help if it need not.

All requests that the event loop reads in one turn are joined at its end, if they have the same k
and experts. A call that will be short is computed right there: handing it to a thread and back
would cost more than it. A call that may be long goes to the engine's thread; what arrives
meanwhile waits, and is joined when the thread is free. No timer delays anything.

A request that is alone, as far as the turn before can tell, does not even wait for its turn's end.

What would have to wait too long is refused at once. While anything waits for the thread, it is
watched: what is late or unwanted is taken out, and a thread that is stuck or has crashed is given
up, together with all that waits for it, and replaced. It must answer a row correctly before
requests are taken again.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.batching.cost import UNKNOWN_SECONDS, RowCost
from service.batching.queue import BatchKey, BatchQueue, Job, QueueLimits
from service.errors import DSSError, QueryError
from service.topk import (
    Answer,
    Answered,
    Call,
    DeadlineExceeded,
    EngineFailed,
    EngineStopped,
    Observer,
    QueueFull,
    TopK,
    TopKEngine,
)

logger = logging.getLogger(__name__)

INLINE_SECONDS = 0.001  # what the event loop may be held up by a call
BATCH_SECONDS = 0.01  # what a request may be held up by those it is joined with
NO_WAIT = (0.0,)
NEVER = float("inf")

WATCH_SECONDS = 0.05
STUCK_SECONDS = 0.8
PATIENCE = 10.0  # how many times longer than expected a call may take before it is stuck
PROBE_SECONDS = 0.5  # between attempts to make a failed engine answer
HEALTH_SECONDS = 1.0  # how long it may take to answer a row
THREADS_LOST = 4  # in vain: then only a restart helps
CLOSE_SECONDS = 5.0  # to wait for a thread that may never end

CANARY: BatchKey = (1, 1, False)
WARM_ROWS = 32


Outcome = list[Answered] | DSSError


class Running(NamedTuple):
    """What the engine's thread computes."""

    jobs: list[Job]
    started: float
    expected: float  # its end


class Batcher:
    def __init__(
        self,
        engine: TopKEngine,
        *,
        name: str,
        observer: Observer,
        bounds: QueueLimits,
        max_batch_rows: int,
        max_batch_seconds: float = BATCH_SECONDS,
        sampler: Callable[[NDArray[np.float32], int], None] | None = None,
        inline_seconds: float = INLINE_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        self._engine = engine
        self._name = name
        self._bounds = bounds
        self._max_batch_rows = max_batch_rows
        self._max_batch_seconds = max_batch_seconds
        self._observer = observer
        self._sampler = sampler  # is shown rows [B,D] and how many experts were searched for them
        self._inline_seconds = inline_seconds
        self._stuck_seconds = stuck_seconds
        self._canary = np.zeros((1, engine.hidden_size), np.float32)
        self._expected: NDArray[np.int64] | None = None  # what the canary is answered

        # Only the event loop touches these.
        self._arrivals = 0  # in this turn
        self._joining = False  # there are others in this turn, or were in the one before
        self._broken = False  # the engine was given up, and has not answered since
        self._threads_lost = 0  # since it last answered
        self._watch_timer: asyncio.TimerHandle | None = None
        self._watch_at = NEVER

        # Both threads touch these, under the lock of `_wake`.
        self._wake = threading.Condition(threading.Lock())
        self._waiting = BatchQueue(bounds)
        self._running: Running | None = None
        self._stopping = False

        # Whoever computes owns the rest: the engine's thread from when the event loop sets
        # `_handed_over` until the thread clears it, and the event loop otherwise.
        self._handed_over = False
        self._rates = RowCost()
        self._best = self._rates.bests
        self._thread: threading.Thread | None = None  # None: the last one was given up
        self._start_thread()

    @property
    def queued_rows(self) -> int:
        return self._waiting.rows

    @property
    def alive(self) -> bool:
        """False once the engine is beyond help; only a restart helps then."""
        return self._threads_lost <= THREADS_LOST

    def warm(self, rows: NDArray[np.float32], k: int) -> None:
        """Before the first request: touch the memory, learn what a row costs, and what the first
        of these rows [B,D] is answered."""
        rows = np.resize(rows, (WARM_ROWS, rows.shape[1]))
        self._engine.topk(rows, k)
        for batch in (rows, rows[:1]):
            started = perf_counter()
            self._engine.topk(batch, k)
            self._rates.learn((k, 1, True), (perf_counter() - started) / len(batch))
        # Asked as it will be: for more answers further experts may be searched, and one be better.
        self._canary = rows[:1].copy()
        self._expected = self._engine.topk(self._canary, CANARY[0]).classes

    def admit(self) -> None:
        """Raise QueueFull if the thread is busy and there is no room for even one row."""
        if self._handed_over and not self._waiting.has_room(1, 0, perf_counter()):
            raise self._full()

    async def topk(self, hidden: NDArray[np.float32], k: int, experts: int = 1) -> Answered:
        """The answer to one request."""
        answer = self.ask(hidden, k, experts)
        return await answer if isinstance(answer, asyncio.Future) else answer

    def ask(
        self, hidden: NDArray[np.float32], k: int, experts: int = 1, deadline: float = NEVER
    ) -> "Answered | asyncio.Future[Answered]":
        """The answer to one request at once if the engine can give it, or else when it will come.

        The arrays are checked here, alone: a wrong request never joins, so it fails no neighbour.
        """
        kind = (k, experts, True)
        if self._joining or self._handed_over or not self._is_short(kind, len(hidden)):
            self._engine.check(hidden, k, experts)
            return self._enqueue(hidden, kind, deadline)
        self._arrived()
        try:
            return self._compute(hidden, kind, NO_WAIT)
        except QueryError:
            raise
        except BaseException as error:
            raise self._failure(error, requests=1) from error

    async def healthy(self) -> bool:
        """Whether the engine answers a row, and as it did at first."""
        if self._broken or not self.alive:
            return False
        try:
            answer = await asyncio.wait_for(self._enqueue(self._canary, CANARY), HEALTH_SECONDS)
        except (DSSError, TimeoutError):
            return False
        if self._expected is None or np.array_equal(answer.classes, self._expected):
            return True
        logger.error("The engine of %s answers a known row differently than at first.", self._name)
        return False

    async def close(self) -> None:
        """Answer everything that waits, then end the thread."""
        self._stop()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    # --- the event loop's side ---------------------------------------------------------------

    def _is_short(self, kind: BatchKey, rows: int) -> bool:
        """Whether so many rows will not hold up the event loop; not if nobody knows yet."""
        seconds = rows * self._best.get(kind, UNKNOWN_SECONDS)
        return seconds <= self._inline_seconds and rows <= self._bounds.rows and not self._broken

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
        while self._waiting.rows and not self._handed_over:
            if self._waiting_is_short() and not self._broken:
                _settle(*self._run(self._take(), in_thread=False))
            else:
                with self._wake:
                    self._handed_over = True
                    self._wake.notify()
        if self._running is not None or self._waiting.rows:
            self._watch_soon(NEVER)

    def _told(self, jobs: list[Job], outcome: Outcome) -> None:
        """The engine's thread has finished a call."""
        if not isinstance(outcome, DSSError):
            self._broken, self._threads_lost = False, 0
        _settle(jobs, outcome)
        self._flush()

    def _enqueue(
        self, hidden: NDArray[np.float32], kind: BatchKey, deadline: float = NEVER
    ) -> "asyncio.Future[Answered]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answered] = loop.create_future()
        seconds = len(hidden) * self._rates.usual(kind)
        now = perf_counter()
        job = Job(hidden, kind, future, now, deadline, seconds)
        with self._wake:
            if self._stopping:
                raise self._stopped()
            if kind is not CANARY:  # which must not be refused because others wait
                if self._broken:
                    raise self._failed()
                if not self._waiting.has_room(len(hidden), hidden.nbytes, now):
                    raise self._full()
            if not self._handed_over:
                self._waiting.found_empty(now)
            self._waiting.add(job)
        self._arrived()
        if deadline < self._watch_at:
            self._watch_soon(deadline)
        return future

    # --- the watch, on the event loop --------------------------------------------------------

    def _watch_soon(self, deadline: float) -> None:
        """Look at what waits in a moment, and not later than the deadline."""
        now = perf_counter()
        at = min(deadline, now + WATCH_SECONDS)
        if self._watch_timer is not None:
            if self._watch_at <= at:
                return
            self._watch_timer.cancel()
        self._watch_at = at
        loop = asyncio.get_running_loop()
        self._watch_timer = loop.call_later(max(0.0, at - now), self._watch)

    def _watch(self) -> None:
        self._watch_timer, self._watch_at = None, NEVER
        now = perf_counter()
        with self._wake:
            running, thread = self._running, self._thread
            unwanted = self._waiting.drop(lambda job: job.deadline <= now or job.future.done())
        late = [*unwanted, *(running.jobs if running else ())]
        _settle([job for job in late if job.deadline <= now], _late())
        if running is not None and now - running.started > self._longest(running):
            self._give_up(f"has not answered for {now - running.started:.1f} s", thread, running)
        if self._waiting or self._running is not None:
            self._watch_soon(min((job.deadline for job in self._waiting), default=NEVER))

    def _longest(self, running: Running) -> float:
        return self._stuck_seconds + PATIENCE * (running.expected - running.started)

    def _give_up(self, why: str, thread: threading.Thread | None, running: Running | None) -> None:
        """Fail everything that waits for the thread, and start another one."""
        with self._wake:
            if self._thread is not thread or self._running is not running:
                return  # it has come back
            jobs = [*(running.jobs if running else ()), *self._waiting.clear()]
            self._running = self._thread = None
            self._handed_over = self._stopping
            self._broken = True
            self._threads_lost += 1
            if self.alive and not self._stopping:
                self._start_thread()
        logger.critical("The engine of %s %s: %d requests fail.", self._name, why, len(jobs))
        _settle(jobs, self._failed())
        if not self.alive:
            logger.critical("The engine of %s is beyond help.", self._name)
        elif not self._stopping:
            asyncio.get_running_loop().call_later(PROBE_SECONDS, self._probe)

    def _probe(self) -> None:
        """Whether a new thread fares better; if not, the watch gives it up as well."""
        if self._stopping:
            return
        future = self._enqueue(self._canary, CANARY)

        def probed(done: "asyncio.Future[Answered]") -> None:
            if not done.cancelled() and done.exception() is None:
                logger.info("The engine of %s answers again.", self._name)
            elif self._broken and self.alive and not self._stopping:
                asyncio.get_running_loop().call_later(PROBE_SECONDS, self._probe)

        future.add_done_callback(probed)

    # --- the engine's thread -----------------------------------------------------------------

    def _start_thread(self) -> None:
        name = f"engine {self._name}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        batch: list[Job] = []
        try:
            while self._wait():
                batch = self._take()
                done = self._run(batch, in_thread=True)
                if not self._hand_back():
                    return
                _call(batch, self._told, *done)
                batch, done = [], ([], [])  # nothing is kept while the thread waits
        except BaseException as error:
            logger.critical("The engine's thread of %s died.", self._name, exc_info=error)
            _call(batch, self._crashed, threading.current_thread())

    def _is_mine(self) -> bool:
        """Whether this thread has not been given up; under the lock."""
        return self._thread is threading.current_thread()

    def _wait(self) -> bool:
        """Whether there is something to do; False once there never will be."""
        with self._wake:
            while not (self._handed_over and self._waiting):
                if self._stopping or not self._is_mine():
                    return False
                self._wake.wait()
            return self._is_mine()

    def _hand_back(self) -> bool:
        """What waits is the event loop's again, unless it would take long. False: given up."""
        with self._wake:
            if not self._is_mine():
                return False
            self._running = None
            if not self._waiting:
                self._waiting.found_empty(perf_counter())
            if not self._stopping and self._waiting_is_short():
                self._handed_over = False
            return True

    def _crashed(self, thread: threading.Thread) -> None:
        self._give_up("has crashed", thread, self._running)

    # --- whoever computes --------------------------------------------------------------------

    def _waiting_is_short(self) -> bool:
        rates = [self._rates.best(kind) for kind in self._waiting.kinds]
        return self._waiting.rows * max(rates, default=0.0) <= self._inline_seconds

    def _take(self) -> list[Job]:
        """The jobs of the next call."""
        with self._wake:
            batch = self._waiting.take(self._max_batch_rows, self._max_batch_seconds)
            if self._handed_over:
                now = perf_counter()
                self._running = Running(batch, now, now + sum(job.seconds for job in batch))
            return batch

    def _run(self, batch: list[Job], *, in_thread: bool) -> tuple[list[Job], Outcome]:
        # A request whose client is gone, or would have its answer too late, is not computed.
        now = perf_counter()
        wanted = [job for job in batch if not job.future.done() and job.deadline > now]
        if not wanted:
            return batch, []
        rest = [job for job in batch if job.deadline <= now]
        waits = [now - job.queued for job in wanted]
        hidden = wanted[0].hidden
        if len(wanted) > 1:
            hidden = np.concatenate([job.hidden for job in wanted])
        try:
            result = self._compute(hidden, wanted[0].kind, waits, in_thread=in_thread)
        except BaseException as error:
            if in_thread and not isinstance(error, Exception):
                raise
            return batch, self._failure(error, requests=len(wanted))
        return [*wanted, *rest], _shares(result, wanted, now)

    def _compute(
        self,
        hidden: NDArray[np.float32],
        kind: BatchKey,
        waits: Sequence[float],
        *,
        in_thread: bool = False,
    ) -> TopK:
        k, experts, _ = kind
        started = perf_counter()
        result = self._engine.topk(hidden, k, experts)
        seconds = perf_counter() - started
        if in_thread:
            with self._wake:
                if self._is_mine():  # one that was given up may come back, when others compute
                    self._count(kind, waits, hidden, seconds, result)
        else:
            self._count(kind, waits, hidden, seconds, result)
        return result

    def _count(
        self,
        kind: BatchKey,
        waits: Sequence[float],
        hidden: NDArray[np.float32],
        seconds: float,
        result: TopK,
    ) -> None:
        rows = len(hidden)
        self._rates.learn(kind, seconds / rows)
        # Counted before anyone is told, so that a client that has its answer finds it counted.
        if kind[2]:
            self._observer.executed(waits, rows, seconds, result)
            if self._sampler is not None:
                self._sampler(hidden, kind[1])

    def _failure(self, error: BaseException, requests: int) -> EngineFailed:
        logger.error(
            "The engine of %s failed on %d requests.", self._name, requests, exc_info=error
        )
        return self._failed()

    def _stop(self) -> None:
        """Take no more requests; the thread answers what waits, and ends."""
        with self._wake:
            self._stopping = self._handed_over = True
            self._wake.notify()

    def _failed(self) -> EngineFailed:
        return EngineFailed(f"Model {self._name} failed to compute an answer.")

    def _stopped(self) -> EngineStopped:
        return EngineStopped(f"Model {self._name} takes no more requests.")

    def _full(self) -> QueueFull:
        return QueueFull(f"Model {self._name} has as much waiting as it can hold; try again soon.")


def _late() -> DeadlineExceeded:
    return DeadlineExceeded("The answer could not be given in time.")


def _shares(result: TopK, jobs: list[Job], started: float) -> list[Answered]:
    if len(jobs) == 1 and jobs[0].kind is CANARY:
        return [result]
    call = Call(started, perf_counter(), result.gate_seconds, result.expert_seconds)
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
                call,
            )
        )
        first = rows.stop
    return shares


def _call(jobs: list[Job], tell: Callable[..., None], *arguments: Any) -> None:
    """Tell the event loop, from whatever thread."""
    if not jobs:
        return
    try:
        jobs[0].future.get_loop().call_soon_threadsafe(tell, *arguments)
    except RuntimeError:
        logger.warning("%d answers came after the event loop had closed.", len(jobs))


def _settle(jobs: list[Job], outcome: Outcome) -> None:
    """Only the event loop may tell those who wait."""
    for position, job in enumerate(jobs):
        if job.future.done():
            continue
        if isinstance(outcome, DSSError):
            job.future.set_exception(type(outcome)(*outcome.args))
        elif position < len(outcome):
            job.future.set_result(outcome[position])
        else:
            job.future.set_exception(_late())
