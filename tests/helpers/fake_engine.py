"""A fake engine whose answers a test can work out, and which can be held, or made to fail."""

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from service.errors import EmptyBatch, KOutOfRange, WrongWidth
from service.topk import TopK


class FakeEngine:
    """Row [x, ...] is answered with the classes x, x+1, ..., by expert 0."""

    def __init__(self, hidden_size: int = 2, n_reachable: int = 100) -> None:
        self.hidden_size = hidden_size
        self.n_reachable = n_reachable
        self.calls: list[tuple[int, int, int]] = []  # rows, k, experts
        self.threads: list[threading.Thread] = []  # who computed each call
        self.failure: BaseException | None = None
        self.entered = threading.Event()
        self.release = threading.Event()
        self.release.set()

    def hold(self) -> None:
        """Make the next calls wait for `release`; `entered` says that one does."""
        self.entered.clear()
        self.release.clear()

    def check(self, hidden: NDArray[np.generic], k: int, experts: int = 1) -> None:
        del experts
        if hidden.ndim != 2 or hidden.shape[1] != self.hidden_size:
            raise WrongWidth("The width is wrong.")
        if not len(hidden):
            raise EmptyBatch("No row.")
        if not 1 <= k <= self.n_reachable:
            raise KOutOfRange("k is out of range.")

    def row_scores(self, k: int, experts: int) -> int:
        del k
        return max(1, experts)

    def topk(self, hidden: NDArray[np.float32], k: int, experts: int = 1) -> TopK:
        self.check(hidden, k, experts)
        self.calls.append((len(hidden), k, experts))
        self.threads.append(threading.current_thread())
        self.entered.set()
        if not self.release.wait(30):
            raise TimeoutError("The test never released the engine.")
        if self.failure is not None:
            raise self.failure
        first = hidden[:, :1].astype(np.int64)
        return TopK(
            classes=first + np.arange(k),
            log_probs=np.broadcast_to(-np.arange(k, dtype=np.float32), (len(hidden), k)),
            experts=np.zeros(len(hidden), np.int64),
            gates=np.ones(len(hidden), np.float32),
            gate_seconds=0.001,
            expert_rows=np.array([len(hidden)]),
            expert_seconds=np.array([0.002]),
        )


class Recorder:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.executions: list[tuple[int, int]] = []  # requests, rows

    def executed(self, waits: Sequence[float], rows: int, seconds: float, result: TopK) -> None:
        del seconds, result
        self.executions.append((len(waits), rows))


def result_of(gate_seconds: float, rows: list[int], seconds: list[float]) -> TopK:
    none, nothing = np.zeros((0, 1), np.int64), np.zeros((0, 1), np.float32)
    return TopK(
        none, nothing, none[:, 0], nothing[:, 0], gate_seconds, np.array(rows), np.array(seconds)
    )
