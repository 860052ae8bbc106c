"""Requests that wait for an engine, within limits of rows, bytes and time.

Not thread-safe: callers hold the lock of `EngineThread`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.topk import SPARSE, Answered, Mode


class BatchKey(NamedTuple):
    """Jobs of one key may be joined."""

    k: int
    experts: int
    counted: bool = True
    mode: Mode = SPARSE


# Requests have the same few keys; making one costs more than finding it.
batch_key = lru_cache(maxsize=1024)(BatchKey)


class Job(NamedTuple):
    """One request that waits."""

    hidden: NDArray[np.float32]  # [B,D]
    key: BatchKey
    future: "asyncio.Future[Answered]"
    queued: float  # moments are of `perf_counter`
    deadline: float
    seconds: float  # what it is expected to cost
    most_seconds: float  # ... if all its rows turn out to be dear


class QueueLimits(NamedTuple):
    rows: int
    bytes: int
    seconds: float
    lasting_seconds: float = float("inf")  # instead, once something has waited ...
    burst_seconds: float = float("inf")  # ... for so long without a break


class BatchQueue:
    """Keeps jobs by the key by which they may be joined.

    The first key is served next and goes to the end if jobs are left, so that no key can starve
    another.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._jobs: dict[BatchKey, deque[Job]] = {}
        self.rows = 0
        self._bytes = 0
        self._seconds = 0.0
        self._idle_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        for jobs in self._jobs.values():
            yield from jobs

    @property
    def keys(self) -> Iterable[BatchKey]:
        return self._jobs

    def note_idle(self, now: float) -> None:
        """The engine has nothing to do: what waits next is a burst, not a lasting load."""
        self._idle_at = now

    def has_room(self, rows: int, size: int, now: float, running_seconds: float = 0.0) -> bool:
        """For so many more rows and bytes, behind what waits and the rest of a running call."""
        limits = self._limits
        if running_seconds + self._seconds > limits.seconds:
            return False
        return not self._jobs or (
            self.rows + rows <= limits.rows
            and self._bytes + size <= limits.bytes
            and self._seconds <= self._max_seconds(now)
        )

    def _max_seconds(self, now: float) -> float:
        limits = self._limits
        lasts = now - self._idle_at > limits.burst_seconds
        return min(limits.seconds, limits.lasting_seconds) if lasts else limits.seconds

    def add(self, job: Job) -> None:
        jobs = self._jobs.get(job.key)
        if jobs is None:
            self._jobs[job.key] = deque((job,))
        else:
            jobs.append(job)
        self.rows += len(job.hidden)
        self._bytes += job.hidden.nbytes
        self._seconds += job.seconds

    def take(self, max_rows: int, max_seconds: float) -> list[Job]:
        """The jobs of the next call: of one key, and within the limits unless one alone is not,
        however dear their rows turn out to be."""
        key = next(iter(self._jobs))
        jobs = self._jobs.pop(key)
        batch = [jobs.popleft()]
        rows, seconds = len(batch[0].hidden), batch[0].most_seconds
        while jobs:
            rows, seconds = rows + len(jobs[0].hidden), seconds + jobs[0].most_seconds
            if rows > max_rows or seconds > max_seconds:
                break
            batch.append(jobs.popleft())
        if jobs:
            self._jobs[key] = jobs
        self._subtract(batch)
        return batch

    def remove(self, unwanted: Callable[[Job], bool]) -> list[Job]:
        removed = [job for job in self if unwanted(job)]
        if removed:
            gone = set(map(id, removed))
            for key, jobs in list(self._jobs.items()):
                kept = deque(job for job in jobs if id(job) not in gone)
                if kept:
                    self._jobs[key] = kept
                else:
                    del self._jobs[key]
            self._subtract(removed)
        return removed

    def clear(self) -> list[Job]:
        return self.remove(lambda _: True)

    def _subtract(self, gone: list[Job]) -> None:
        if not self._jobs:  # exactly nothing, whatever rounding would leave
            self.rows, self._bytes, self._seconds = 0, 0, 0.0
            return
        for job in gone:
            self.rows -= len(job.hidden)
            self._bytes -= job.hidden.nbytes
            self._seconds -= job.seconds
