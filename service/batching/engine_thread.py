"""Computes what waits: long calls in a thread that is watched and replaced, short ones without it.

The event loop and the thread share a queue, under one lock. `busy` says which of them computes:
the event loop sets it to hand the queue over, and the thread clears it when what is left is short
enough for the event loop.

While anything waits for the thread, the event loop looks at it twenty times a second, and at the
next deadline. Jobs that are late or cancelled are removed. A thread that is stuck or has crashed is
given up, since it cannot be ended; all that waits for it fails, and another thread takes its place,
which must answer a row before requests are taken again.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from service.batching.cost import RowCost
from service.batching.engine_calls import (
    NEVER,
    PROBE,
    EngineCalls,
    Outcome,
    Rows,
    late,
    settle,
)
from service.batching.queue import BatchKey, BatchQueue, Job
from service.errors import DSSError
from service.topk import Answered, TopK

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.05
STUCK_SECONDS = 0.8
STUCK_FACTOR = 10.0  # how many times longer than expected a call may take, beside STUCK_SECONDS
PROBE_SECONDS = 0.5  # between attempts to make a failed engine answer
MOST_REPLACED = 4  # threads in a row without an answer: then only a restart helps
CLOSE_SECONDS = 5.0  # to wait for a thread that may never end


class Running(NamedTuple):
    """The call that the thread makes."""

    jobs: list[Job]
    started: float
    seconds: float  # that it is expected to take


class EngineThread:
    def __init__(
        self,
        calls: EngineCalls,
        queue: BatchQueue,
        cost: RowCost,
        *,
        max_batch_rows: int,
        max_batch_seconds: float,
        inline_seconds: float,
        stuck_seconds: float,
    ) -> None:
        self._calls = calls
        self._cost = cost
        self._max_batch_rows = max_batch_rows
        self._max_batch_seconds = max_batch_seconds
        self._inline_seconds = inline_seconds
        self._stuck_seconds = stuck_seconds

        # Only the event loop touches these.
        self.failed = False  # the thread was given up, and no call has been answered since
        self._given_up = 0  # threads since a call was last answered
        self._watch_timer: asyncio.TimerHandle | None = None
        self._watch_at = NEVER

        # Both threads touch these, under the lock of `_changed`.
        self._changed = threading.Condition(threading.Lock())
        self._queue = queue
        self._running: Running | None = None
        self.busy = False
        self.stopping = False
        self.thread: threading.Thread | None = None  # None: the last one was given up
        self._start()

    @property
    def alive(self) -> bool:
        """False once thread after thread was given up: then only a restart helps."""
        return self._given_up <= MOST_REPLACED

    # --- the event loop's side ---------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Let a job wait until `compute_queue` is called next."""
        with self._changed:
            if not self.busy:
                self._queue.note_idle(job.queued)
            self._queue.add(job)
        if job.deadline < self._watch_at:
            self._watch_by(job.deadline)

    def compute_queue(self) -> None:
        """Compute what waits, or hand it over to the thread."""
        while self._queue and not self.busy:
            if self.failed or not self._is_short():
                self._hand_over()
            else:
                self._compute_next()
        if self._running is not None or self._queue:
            self._watch_by(NEVER)

    def _compute_next(self) -> None:
        batch = self._take()
        try:
            outcomes = self._calls.run(batch, self._calls.report)
        except BaseException as error:  # the event loop goes on, whatever it is
            outcomes = self._calls.failures(batch, error)
        settle(batch, outcomes)

    def _hand_over(self) -> None:
        with self._changed:
            self.busy = True
            self._changed.notify()

    async def close(self) -> None:
        """Let the thread answer everything that waits, and end it."""
        with self._changed:
            self.stopping = self.busy = True
            self._changed.notify()
        if self.thread is not None:
            await asyncio.to_thread(self.thread.join, CLOSE_SECONDS)

    def _finished(self, batch: list[Job], outcomes: list[Outcome]) -> None:
        """The thread has made a call."""
        if not all(isinstance(outcome, DSSError) for outcome in outcomes):
            self.failed, self._given_up = False, 0
        settle(batch, outcomes)
        self.compute_queue()

    def _crashed(self, thread: threading.Thread) -> None:
        self._give_up("has crashed", thread, self._running)

    # --- the watch, on the event loop --------------------------------------------------------

    def _watch_by(self, deadline: float) -> None:
        """Look at what waits in a moment, and not later than the deadline."""
        now = perf_counter()
        at = min(deadline, now + WATCH_SECONDS)
        if self._watch_timer is not None:
            if self._watch_at <= at:
                return
            self._watch_timer.cancel()
        self._watch_at = at
        loop = asyncio.get_running_loop()
        self._watch_timer = loop.call_later(max(0.0, at - now), self._look)

    def _look(self) -> None:
        self._watch_timer, self._watch_at = None, NEVER
        now = perf_counter()
        with self._changed:
            running, thread = self._running, self.thread
            removed = self._queue.remove(lambda job: job.deadline <= now or job.future.done())
            next_deadline = min((job.deadline for job in self._queue), default=NEVER)
        jobs = [*removed, *(running.jobs if running else ())]
        _fail([job for job in jobs if job.deadline <= now], late)
        if running is not None and now - running.started > self._longest(running):
            self._give_up(f"has not answered for {now - running.started:.1f} s", thread, running)
        if self._running is not None or self._queue:
            self._watch_by(next_deadline)

    def _longest(self, running: Running) -> float:
        return self._stuck_seconds + STUCK_FACTOR * running.seconds

    def _give_up(self, why: str, thread: threading.Thread | None, running: Running | None) -> None:
        """Fail everything that waits for the thread, and start another one."""
        with self._changed:
            if self.thread is not thread or self._running is not running:
                return  # it has come back
            jobs = [*(running.jobs if running else ()), *self._queue.clear()]
            self._running = self.thread = None
            self.busy = self.stopping
            self.failed = True
            self._given_up += 1
            replaced = self.alive and not self.stopping
            if replaced:
                self._start()
        logger.critical(
            "The engine of %s %s: %d requests fail. %s",
            self._calls.name,
            why,
            len(jobs),
            self._what_follows(replaced),
        )
        _fail(jobs, self._calls.failed)
        if replaced:
            asyncio.get_running_loop().call_later(PROBE_SECONDS, self._probe)

    def _what_follows(self, replaced: bool) -> str:
        if replaced:
            return "Others are refused until a new thread has answered a row."
        if self.alive:
            return "The model is being closed."
        before = self._given_up - 1
        return f"{before} threads before it failed as well: the process must be restarted."

    def _probe(self) -> None:
        """Ask the new thread for a row; if it does not answer, the watch gives it up as well."""
        if self.stopping:
            return
        thread, job = self.thread, self._calls.job(self._calls.probe_row, PROBE)
        self.add(job)
        self.compute_queue()

        def probed(done: "asyncio.Future[Answered]") -> None:
            if not done.cancelled() and done.exception() is None:
                logger.info("The engine of %s answers again.", self._calls.name)
            elif self.thread is thread:  # if it was given up, the next one is asked anyway
                asyncio.get_running_loop().call_later(PROBE_SECONDS, self._probe)

        job.future.add_done_callback(probed)

    # --- whoever computes --------------------------------------------------------------------

    def _is_short(self) -> bool:
        """Whether all that waits, as dear as the dearest of it, is short enough for the loop."""
        rows = self._queue.rows
        seconds = max((self._cost.fastest(key, rows) for key in self._queue.keys), default=0.0)
        return seconds <= self._inline_seconds

    def _take(self) -> list[Job]:
        """The jobs of the next call."""
        with self._changed:
            batch = self._queue.take(self._max_batch_rows, self._max_batch_seconds)
            if self.busy:
                self._running = Running(batch, perf_counter(), sum(job.seconds for job in batch))
            return batch

    # --- the thread itself -------------------------------------------------------------------

    def _start(self) -> None:
        name = f"engine {self._calls.name}"
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        batch: list[Job] = []
        outcomes: list[Outcome] = []
        try:
            while self._wait():
                batch = self._take()
                outcomes = self._run(batch)
                if not self._hand_back():
                    return
                _call(batch, self._finished, batch, outcomes)
                batch, outcomes = [], []  # nothing is kept while the thread waits
        except BaseException as error:
            logger.critical("The engine's thread of %s died.", self._calls.name, exc_info=error)
            _call(batch, self._crashed, threading.current_thread())

    def _wait(self) -> bool:
        """Whether there is something to do; False once there never will be."""
        with self._changed:
            while not (self.busy and self._queue):
                if self.stopping or not self._is_current():
                    return False
                self._changed.wait()
            return self._is_current()

    def _run(self, batch: list[Job]) -> list[Outcome]:
        try:
            return self._calls.run(batch, self._report)
        except Exception as error:  # anything else ends the thread
            return self._calls.failures(batch, error)

    def _report(
        self, key: BatchKey, hidden: Rows, waits: Sequence[float], seconds: float, result: TopK
    ) -> None:
        """Not if the thread was given up: another one may be reporting."""
        with self._changed:
            if self._is_current():
                self._calls.report(key, hidden, waits, seconds, result)

    def _hand_back(self) -> bool:
        """Let the event loop compute what waits, unless that would take long. False: given up."""
        with self._changed:
            if not self._is_current():
                return False
            self._running = None
            if not self._queue:
                self._queue.note_idle(perf_counter())
            if not self.stopping and self._is_short():
                self.busy = False
            return True

    def _is_current(self) -> bool:
        """Whether this thread has not been given up; under the lock."""
        return self.thread is threading.current_thread()


def _fail(jobs: Sequence[Job], error: Callable[[], DSSError]) -> None:
    settle(jobs, [error() for _ in jobs])


def _call(jobs: list[Job], callback: Callable[..., None], *arguments: Any) -> None:
    """Call something on the event loop of these jobs, from whatever thread."""
    if not jobs:
        return
    try:
        jobs[0].future.get_loop().call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        logger.warning("%d answers came after the event loop had closed.", len(jobs))
