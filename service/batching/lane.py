"""Where a model's jobs wait for engine calls, and the watch over those calls.

The event loop and the threads share a lane's queue, under one lock. `busy` says who computes: the
event loop sets it to hand the queue over to the threads, and a thread clears it when nothing is
left for it.

While anything waits for a thread, the event loop looks at it twenty times a second, and at the next
deadline. Jobs that are late or cancelled are removed. A call that is stuck or has crashed is given
up; all that waits for it fails, and the next thread must answer a row before requests are taken
again.
"""

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

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
from service.batching.queue import BatchKey, BatchQueue, Job, QueueLimits
from service.batching.threads import ThreadGroup
from service.errors import DSSError
from service.topk import Answered, TopK

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.05
STUCK_SECONDS = 0.8
STUCK_FACTOR = 10.0  # how many times longer than expected a call may take, beside STUCK_SECONDS
PROBE_SECONDS = 0.5  # between attempts to make a failed engine answer
MOST_GIVEN_UP = 4  # calls in a row without an answer: then only a restart helps
CLOSE_SECONDS = 5.0  # to wait for a call that may never end


@dataclass(frozen=True, kw_only=True)
class Running:
    """The call that a thread makes."""

    jobs: list[Job]
    rows: int
    started: float
    seconds: float  # that it is expected to take
    further_seconds: float = 0.0  # of the same jobs' calls after it


Settled = tuple[list[Job], list[Outcome]]  # jobs that are over, and their answers or errors


class Lane(ABC):
    def __init__(
        self,
        calls: EngineCalls,
        cost: RowCost,
        limits: QueueLimits,
        threads: ThreadGroup,
        *,
        stuck_seconds: float,
    ) -> None:
        self._calls = calls
        self._cost = cost
        self._threads = threads
        self._stuck_seconds = stuck_seconds
        threads.start()

        # Only the event loop touches these.
        self.failed = False  # a call was given up, and none has been answered since
        self._given_up = 0  # calls since one was last answered
        self._watch_timer: asyncio.TimerHandle | None = None
        self._watch_at = NEVER

        # All threads touch these, under the lock of `_changed`.
        self._changed = threading.Condition(threading.Lock())
        self._queue = BatchQueue(limits)
        self._running: Running | None = None
        self._thread: threading.Thread | None = None  # that makes the running call
        self._tenure = 0  # of a thread over the queue: a new one begins when a call is given up
        self._submitted = False  # a turn of this lane waits for a thread or is with one
        self.busy = False
        self.stopping = False

    # --- what a kind of lane does ------------------------------------------------------------

    @abstractmethod
    def _next_call(self) -> Running:
        """Takes the jobs of the next call from the queue; under the lock."""

    @abstractmethod
    def _make(self, call: Running, report: Callable[..., None]) -> Settled:
        """Makes the call."""

    def _has_work(self) -> bool:
        """Whether something waits for the threads; under the lock."""
        return bool(self._queue)

    def _keeps_busy(self) -> bool:
        """Whether the threads shall go on with what is left; under the lock."""
        return self._has_work()

    # --- the event loop's side ---------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """False once call after call was given up: then only a restart helps."""
        return self._given_up <= MOST_GIVEN_UP

    @property
    def rows(self) -> int:
        return self._queue.rows

    def has_room(self, rows: int, size: int, now: float) -> bool:
        """For so many more rows and bytes, behind what waits and what is being computed."""
        running = self._running
        seconds = 0.0
        if running is not None:
            seconds = max(0.0, running.started + running.seconds - now) + running.further_seconds
        # Without the lock: threads only take from the queue, so there can only be more room.
        return self._queue.has_room(rows, size, now, seconds)

    def add(self, job: Job) -> None:
        """Let a job wait until `compute_queue` is called next."""
        with self._changed:
            if not self.busy:
                self._queue.note_idle(job.queued)
            self._queue.add(job)
        if job.deadline < self._watch_at:
            self._watch_by(job.deadline)

    def compute_queue(self) -> None:
        """Have the threads compute what waits."""
        if self._queue and not self.busy:
            self._hand_over()
        if self._running is not None or self._queue:
            self._watch_by(NEVER)

    def _hand_over(self) -> None:
        with self._changed:
            self.busy = self._submitted = True
            turn = partial(self._turn, self._tenure)
        self._threads.submit(turn)

    def stop(self) -> None:
        """Take no more jobs, and let the threads answer those that wait."""
        with self._changed:
            self.stopping = True
            waits = self._has_work() and not self.busy
        if waits:
            self._hand_over()

    async def drain(self) -> None:
        """After `stop`: wait until all jobs are answered."""
        if self._submitted:
            await asyncio.to_thread(self._wait_for_threads)
        if self._watch_timer is not None:
            self._watch_timer.cancel()

    def _wait_for_threads(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._submitted, CLOSE_SECONDS)

    def _finished(self, jobs: list[Job], outcomes: list[Outcome]) -> None:
        """A thread has made a call."""
        if not all(isinstance(outcome, DSSError) for outcome in outcomes):
            self.failed, self._given_up = False, 0
        settle(jobs, outcomes)
        self.compute_queue()

    def _crashed(self, running: Running) -> None:
        self._give_up("has crashed", running)

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
            running = self._running
            removed = self._queue.remove(lambda job: job.deadline <= now or job.future.done())
            next_deadline = min((job.deadline for job in self._queue), default=NEVER)
        jobs = [*removed, *(running.jobs if running else ())]
        _fail([job for job in jobs if job.deadline <= now], late)
        if running is not None and now - running.started > self._longest(running):
            self._give_up(f"has not answered for {now - running.started:.1f} s", running)
        if self._running is not None or self._queue:
            self._watch_by(next_deadline)

    def _longest(self, running: Running) -> float:
        return self._stuck_seconds + STUCK_FACTOR * running.seconds

    def _give_up(self, why: str, running: Running) -> None:
        """Fail everything that waits for a call, and let another thread begin anew."""
        with self._changed:
            if self._running is not running:
                return  # it has come back
            thread = self._thread
            jobs = [*running.jobs, *self._queue.clear()]
            self._running = self._thread = None
            self._forget_call()
            self._tenure += 1
            self.busy = self._submitted = False
            self.failed = True
            self._given_up += 1
            self._changed.notify_all()
        seconds = perf_counter() - running.started
        self._cost.learn_given_up(running.jobs[0].key, running.rows, seconds)
        if thread is not None:
            self._threads.give_up(thread)
        goes_on = self.alive and not self.stopping
        logger.critical(
            "The engine of %s %s: %d requests fail. %s",
            self._calls.name,
            why,
            len(jobs),
            self._what_follows(goes_on),
        )
        _fail(jobs, self._calls.failed)
        if goes_on:
            asyncio.get_running_loop().call_later(PROBE_SECONDS, self._probe)

    def _forget_call(self) -> None:  # noqa: B027
        """A lane that keeps something between two calls lets go of it; under the lock."""

    def _what_follows(self, goes_on: bool) -> str:
        if goes_on:
            return "Others are refused until a new thread has answered a row."
        if self.alive:
            return "The model is being closed."
        before = self._given_up - 1
        return f"{before} threads before it failed as well: the process must be restarted."

    def _probe(self) -> None:
        """Ask another thread for a row; if it does not answer, the watch gives it up as well."""
        if self.stopping:
            return
        tenure, job = self._tenure, self._calls.job(self._calls.probe_row, PROBE)
        self.add(job)
        self.compute_queue()

        def probed(done: "asyncio.Future[Answered]") -> None:
            if not done.cancelled() and done.exception() is None:
                logger.info("The engine of %s answers again.", self._calls.name)
            elif self._tenure == tenure:  # if it was given up, the next one is asked anyway
                asyncio.get_running_loop().call_later(PROBE_SECONDS, self._probe)

        job.future.add_done_callback(probed)

    # --- the threads' side -------------------------------------------------------------------

    def _turn(self, tenure: int) -> bool:
        """Make one call, in a thread. True: there is more to compute."""
        call = self._begin(tenure)
        if call is None:
            return False
        try:
            jobs, outcomes = self._run(call, tenure)
        except BaseException as error:
            logger.critical("The engine of %s crashed.", self._calls.name, exc_info=error)
            _call(call.jobs, self._crashed, call)
            return False
        goes_on = self._end(tenure, is_over=bool(jobs))
        if goes_on is None:
            return False
        _call(jobs, self._finished, jobs, outcomes)
        if not goes_on:
            self._leave(tenure)
        return goes_on

    def _begin(self, tenure: int) -> Running | None:
        """The call to make; None if there is nothing to do."""
        with self._changed:
            if self._tenure != tenure:
                return None
            if not self._has_work():  # the watch has removed it
                self.busy = self._submitted = False
                self._changed.notify_all()
                return None
            self._thread = threading.current_thread()
            self._running = self._next_call()
            return self._running

    def _run(self, call: Running, tenure: int) -> Settled:
        def report(
            key: BatchKey, hidden: Rows, waits: Sequence[float], seconds: float, result: TopK
        ) -> None:
            """Not if the call was given up."""
            with self._changed:
                if self._tenure == tenure:
                    self._calls.report(key, hidden, waits, seconds, result)

        try:
            return self._make(call, report)
        except Exception as error:  # anything else is a crash
            return call.jobs, self._calls.failures(call.jobs, error)

    def _end(self, tenure: int, *, is_over: bool) -> bool | None:
        """Whether there is more for this thread; None if the call was given up."""
        with self._changed:
            if self._tenure != tenure:
                return None
            if is_over:
                self._forget_call()
            self._running = self._thread = None
            if not self._has_work():
                self._queue.note_idle(perf_counter())
            self.busy = self._keeps_busy()
            return self.busy

    def _leave(self, tenure: int) -> None:
        """After the answers are on their way: `drain` may go on."""
        with self._changed:
            if self._tenure == tenure and not self.busy:
                self._submitted = False
                self._changed.notify_all()


def _fail(jobs: Sequence[Job], error: Callable[[], DSSError]) -> None:
    settle(jobs, [error() for _ in jobs])


def _call(jobs: Sequence[Job], callback: Callable[..., None], *arguments: Any) -> None:
    """Call something on the event loop of these jobs, from whatever thread."""
    if not jobs:
        return
    try:
        jobs[0].future.get_loop().call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        logger.warning("%d answers came after the event loop had closed.", len(jobs))
