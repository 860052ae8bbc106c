"""A fake engine whose answers a test can work out, and which can be held, or made to fail."""

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from service.bundle.contract import FEATURES, Contract
from service.errors import EmptyBatch, KOutOfRange, NoContract, NoHead, WrongWidth
from service.topk import RUNGS, SPARSE, Mode, Objective, TopK

CONTRACT = Contract(
    rows=1000,
    levels=[0.9, 0.99],
    ks=[10],
    weights=[[0.0] * FEATURES],
    experts=[[0.0]],
    thresholds=[[0.0, 0.0]],
)


class FakeEngine:
    """Row [x, ...] is answered with the classes x, x+1, ..., by expert 0.

    With a contract, a row whose last number is not zero is escalated if a recall is asked for.
    """

    objective: Objective = "accuracy"

    def __init__(
        self,
        hidden_size: int = 2,
        n_reachable: int = 100,
        *,
        can_exact: bool = False,
        contract: Contract | None = None,
    ) -> None:
        self.hidden_size = hidden_size
        self.n_reachable = n_reachable
        self.can_exact = can_exact or contract is not None
        self.contract = contract
        self.calls: list[tuple[int, int, int]] = []  # rows, k, experts
        self.modes: list[Mode] = []  # of these calls
        self.threads: list[threading.Thread] = []  # who computed each call
        self.failure: BaseException | None = None
        self.entered = threading.Event()
        self.release = threading.Event()
        self.release.set()

    def hold(self) -> None:
        """Make the next calls wait for `release`; `entered` says that one does."""
        self.entered.clear()
        self.release.clear()

    def check(
        self, hidden: NDArray[np.generic], k: int, experts: int = 1, mode: Mode = SPARSE
    ) -> None:
        del experts
        if mode != SPARSE and not self.can_exact:
            raise NoHead("This model ships no output layer.")
        if mode.recall is not None and self.contract is None:
            raise NoContract("This model has no calibration.")
        if hidden.ndim != 2 or hidden.shape[1] != self.hidden_size:
            raise WrongWidth("The width is wrong.")
        if not len(hidden):
            raise EmptyBatch("No row.")
        if not 1 <= k <= self.n_reachable:
            raise KOutOfRange("k is out of range.")

    def row_scores(self, k: int, experts: int, mode: Mode = SPARSE) -> int:
        del k
        scanned = self.n_reachable if mode.exact or mode.recall is not None else 0
        return max(1, experts) + scanned

    def topk(
        self, hidden: NDArray[np.float32], k: int, experts: int = 1, mode: Mode = SPARSE
    ) -> TopK:
        self.check(hidden, k, experts, mode)
        self.calls.append((len(hidden), k, experts))
        self.modes.append(mode)
        self.threads.append(threading.current_thread())
        self.entered.set()
        if not self.release.wait(30):
            raise TimeoutError("The test never released the engine.")
        if self.failure is not None:
            raise self.failure
        first = hidden[:, :1].astype(np.int64)
        rungs = None if mode == SPARSE else self._rungs(hidden, mode)  # [B]
        return TopK(
            classes=first + np.arange(k),
            log_probs=np.broadcast_to(-np.arange(k, dtype=np.float32), (len(hidden), k)),
            experts=np.zeros(len(hidden), np.int64),
            gates=np.ones(len(hidden), np.float32),
            gate_seconds=0.001,
            expert_rows=np.array([len(hidden)]),
            expert_seconds=np.array([0.002]),
            searched=None if rungs is None else np.where(rungs == RUNGS.index("exact"), 0, experts),
            rungs=rungs,
        )

    def _rungs(self, hidden: NDArray[np.float32], mode: Mode) -> NDArray[np.uint8]:
        rungs = np.full(len(hidden), RUNGS.index("sparse"), np.uint8)
        if mode.exact or mode.recall == 1.0:
            rungs[:] = RUNGS.index("exact")
        elif mode.recall is not None:
            rungs[hidden[:, -1] != 0] = RUNGS.index("escalated")
        return rungs


class Recorder:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.executions: list[tuple[int, int]] = []  # requests, rows
        self.rungs: list[tuple[Mode, list[int]]] = []

    def executed(self, waits: Sequence[float], rows: int, seconds: float, result: TopK) -> None:
        del seconds, result
        self.executions.append((len(waits), rows))

    def answered(self, mode: Mode, rungs: NDArray[np.uint8]) -> None:
        self.rungs.append((mode, rungs.tolist()))


def result_of(gate_seconds: float, rows: list[int], seconds: list[float]) -> TopK:
    none, nothing = np.zeros((0, 1), np.int64), np.zeros((0, 1), np.float32)
    return TopK(
        none, nothing, none[:, 0], nothing[:, 0], gate_seconds, np.array(rows), np.array(seconds)
    )
