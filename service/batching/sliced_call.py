"""One job whose answer is computed a few rows at a time."""

from collections.abc import Sequence
from time import perf_counter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from service.batching.queue import Job
from service.topk import Answer, Call, TopK, TopKEngine

ScalarT = TypeVar("ScalarT", bound=np.generic)


class SlicedCall:
    def __init__(self, engine: TopKEngine, job: Job) -> None:
        self.job = job
        self.seconds = 0.0  # that the slices took
        self.last_rows, self.last_seconds = 0, 0.0  # of the last slice
        self.wait = perf_counter() - job.queued
        self.rows_left = len(job.hidden)
        self._engine = engine
        self._started = perf_counter()
        self._parts: list[TopK] = []

    def compute(self, rows: int) -> None:
        """Answers so many more rows."""
        first = len(self.job.hidden) - self.rows_left
        k, experts, _, mode = self.job.key
        part = self.job.hidden[first : first + rows]
        started = perf_counter()
        self._parts.append(self._engine.topk(part, k, experts, mode))
        seconds = perf_counter() - started
        self.last_rows, self.last_seconds = rows, seconds
        self.seconds += seconds
        self.rows_left -= rows

    def result(self) -> TopK:
        """The answer to all rows, as one call would have given it."""
        parts = self._parts
        return TopK(
            np.concatenate([part.classes for part in parts]),
            np.concatenate([part.log_probs for part in parts]),
            np.concatenate([part.experts for part in parts]),
            np.concatenate([part.gates for part in parts]),
            sum(part.gate_seconds for part in parts),
            np.sum([part.expert_rows for part in parts], axis=0),
            np.sum([part.expert_seconds for part in parts], axis=0),
            _joined([part.searched for part in parts]),
            _joined([part.rungs for part in parts]),
        )

    def answer(self, result: TopK) -> Answer:
        call = Call(self._started, perf_counter(), result.gate_seconds, result.expert_seconds)
        classes, log_probs, experts, gates = result[:4]
        return Answer(classes, log_probs, experts, gates, call, result.searched, result.rungs)


def _joined(parts: Sequence[NDArray[ScalarT] | None]) -> NDArray[ScalarT] | None:
    found = [part for part in parts if part is not None]
    return np.concatenate(found) if found else None
