"""Requests that wait for an engine, within bounds of rows, bytes and time.

Not safe by itself: the batcher calls it under its lock.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BatchKey = tuple[int, int, bool]  # k, experts, counted; jobs of one kind may be joined


class Job(NamedTuple):
    hidden: NDArray[np.float32]  # [B,D]
    kind: BatchKey
    future: "asyncio.Future[Any]"
    queued: float
    deadline: float
    seconds: float  # what it is expected to cost


class QueueLimits(NamedTuple):
    rows: int
    bytes: int
    seconds: float
    lasting_seconds: float = float("inf")  # instead, once something has waited ...
    burst_seconds: float = float("inf")  # ... for so long without a break


class BatchQueue:
    """Jobs are kept by what they may be joined with: the first kind is served next and goes to the
    end of the line if jobs are left, so that no kind can starve another."""

    def __init__(self, bounds: QueueLimits) -> None:
        self._bounds = bounds
        self._jobs: dict[BatchKey, deque[Job]] = {}
        self.rows = 0
        self._bytes = 0
        self._seconds = 0.0
        self._empty_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        for jobs in self._jobs.values():
            yield from jobs

    @property
    def kinds(self) -> Iterable[BatchKey]:
        return self._jobs

    def found_empty(self, now: float) -> None:
        """Whoever computes had nothing to do: what waits next is a burst, not a lasting load."""
        self._empty_at = now

    def has_room(self, rows: int, size: int, now: float) -> bool:
        """For so many more rows and bytes, behind what waits already."""
        bounds = self._bounds
        return not self._jobs or (
            self.rows + rows <= bounds.rows
            and self._bytes + size <= bounds.bytes
            and self._seconds <= self._most_seconds(now)
        )

    def _most_seconds(self, now: float) -> float:
        bounds = self._bounds
        lasts = now - self._empty_at > bounds.burst_seconds
        return min(bounds.seconds, bounds.lasting_seconds) if lasts else bounds.seconds

    def add(self, job: Job) -> None:
        jobs = self._jobs.get(job.kind)
        if jobs is None:
            self._jobs[job.kind] = deque((job,))
        else:
            jobs.append(job)
        self.rows += len(job.hidden)
        self._bytes += job.hidden.nbytes
        self._seconds += job.seconds

    def take(self, max_rows: int, max_seconds: float) -> list[Job]:
        """The jobs of the next call: of one kind, and no more than that unless one alone is."""
        kind = next(iter(self._jobs))
        jobs = self._jobs.pop(kind)
        batch = [jobs.popleft()]
        rows, seconds = len(batch[0].hidden), batch[0].seconds
        while jobs:
            rows, seconds = rows + len(jobs[0].hidden), seconds + jobs[0].seconds
            if rows > max_rows or seconds > max_seconds:
                break
            batch.append(jobs.popleft())
        if jobs:
            self._jobs[kind] = jobs
        self._left(batch)
        return batch

    def drop(self, unwanted: Callable[[Job], bool]) -> list[Job]:
        """Take out those that nobody should compute."""
        dropped = [job for job in self if unwanted(job)]
        if dropped:
            gone = set(map(id, dropped))
            for kind, jobs in list(self._jobs.items()):
                kept = deque(job for job in jobs if id(job) not in gone)
                if kept:
                    self._jobs[kind] = kept
                else:
                    del self._jobs[kind]
            self._left(dropped)
        return dropped

    def clear(self) -> list[Job]:
        return self.drop(lambda _: True)

    def _left(self, gone: list[Job]) -> None:
        if not self._jobs:  # also of what rounding has left
            self.rows, self._bytes, self._seconds = 0, 0, 0.0
            return
        for job in gone:
            self.rows -= len(job.hidden)
            self._bytes -= job.hidden.nbytes
            self._seconds -= job.seconds
