"""Jobs that would take longer than a joined call may: each is computed alone, in slices of rows.

After each slice the thread looks whether anybody still waits for the answer, and lets other models
have a turn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from service.batching.engine_calls import late
from service.batching.lane import Lane, Running, Settled
from service.batching.sliced_call import SlicedCall

SLICE_SECONDS = 0.05
# With fewer rows a search of many experts is bound by memory: each slice reads all their weights.
FEWEST_ROWS = 16
SLICE_CANDIDATES = 2**20  # rows times experts times k: what a slice holds in memory


@dataclass(frozen=True, kw_only=True)
class Slice(Running):
    of: SlicedCall


class LongLane(Lane):
    _sliced: SlicedCall | None = None  # the job that is being computed

    def _has_work(self) -> bool:
        return self._sliced is not None or super()._has_work()

    def _forget_call(self) -> None:
        self._sliced = None

    def _next_call(self) -> Slice:
        if self._sliced is None:
            (job,) = self._queue.take(max_rows=0, max_seconds=0.0)
            self._sliced = self._calls.sliced(job)
        sliced, key = self._sliced, self._sliced.job.key
        rows = min(sliced.rows_left, self._slice_rows(sliced))
        return Slice(
            jobs=[sliced.job],
            rows=rows,
            started=perf_counter(),
            seconds=self._cost.most(key, rows),
            further_seconds=self._cost.typical(key, sliced.rows_left - rows),
            of=sliced,
        )

    def _slice_rows(self, sliced: SlicedCall) -> int:
        """As many as take SLICE_SECONDS, by the time of the slice before; a row's cost would not
        tell, since it falls with the number of rows."""
        key = sliced.job.key
        most = max(1, SLICE_CANDIDATES // (key.k * key.experts))
        rows = FEWEST_ROWS
        if sliced.last_rows:
            faster = SLICE_SECONDS / max(sliced.last_seconds, 1e-9)
            rows = max(FEWEST_ROWS, int(sliced.last_rows * min(2.0, faster)))
        if key.mode.recall is not None:  # the rows before may have been the easy ones
            row_seconds = max(self._cost.most(key, 1), 1e-9)
            rows = min(rows, max(FEWEST_ROWS, int(SLICE_SECONDS / row_seconds)))
        return min(most, rows)

    def _make(self, call: Running, report: Callable[..., None]) -> Settled:
        assert isinstance(call, Slice)  # noqa: S101
        sliced, job = call.of, call.of.job
        if job.future.done() or job.deadline <= perf_counter():
            return [job], [late()]
        sliced.compute(call.rows)
        if sliced.rows_left:
            self._calls.learn(job.key, call.rows, sliced.last_seconds)
            return [], []
        result = sliced.result()
        report(job.key, job.hidden, [sliced.wait], sliced.seconds, result)
        return [job], [sliced.answer(result)]
