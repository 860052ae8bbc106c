"""Jobs that are joined into calls; those that will be very short are made on the event loop."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

from service.batching.engine_calls import settle
from service.batching.lane import Lane, Running, Settled


class ShortLane(Lane):
    def __init__(
        self,
        *arguments: Any,
        max_batch_rows: int,
        max_batch_seconds: float,
        inline_seconds: float,
        stuck_seconds: float,
    ) -> None:
        super().__init__(*arguments, stuck_seconds=stuck_seconds)
        self._max_batch_rows = max_batch_rows
        self._max_batch_seconds = max_batch_seconds
        self._inline_seconds = inline_seconds

    def compute_queue(self) -> None:
        """Compute what waits, or hand it over to the threads."""
        while self._queue and not self.busy and not self.failed and self._is_short():
            call = self._next_call()
            try:
                outcomes = self._calls.run(call.jobs, self._calls.report)
            except BaseException as error:  # the event loop goes on, whatever it is
                outcomes = self._calls.failures(call.jobs, error)
            settle(call.jobs, outcomes)
        super().compute_queue()

    def _is_short(self) -> bool:
        """Whether all that waits, as dear as the dearest of it, is short enough for the loop."""
        rows = self._queue.rows
        seconds = max((self._cost.fastest(key, rows) for key in self._queue.keys), default=0.0)
        return seconds <= self._inline_seconds

    def _keeps_busy(self) -> bool:
        return self._has_work() and (self.stopping or not self._is_short())

    def _next_call(self) -> Running:
        jobs = self._queue.take(self._max_batch_rows, self._max_batch_seconds)
        rows = sum(len(job.hidden) for job in jobs)
        seconds = sum(job.most_seconds for job in jobs)
        return Running(jobs=jobs, rows=rows, started=perf_counter(), seconds=seconds)

    def _make(self, call: Running, report: Callable[..., None]) -> Settled:
        return call.jobs, self._calls.run(call.jobs, report)
