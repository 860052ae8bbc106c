"""Top-k queries: what an engine answers, what callers need of one, and how a call can fail.

B rows, D hidden, K experts, k answers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from service.errors import DSSError, Kind

if TYPE_CHECKING:
    from service.bundle.contract import Contract

Objective = Literal["accuracy", "fidelity"]  # what a layer was made for

NO_CLASS = -1  # in place of a class id where an expert holds fewer than k classes


class Mode(NamedTuple):
    """What an answer must be, beyond what the gate's best experts hold; at most one is asked."""

    exact: bool = False  # the head's own k best, proven
    recall: float | None = None  # a promise, in (0, 1]: rows that may miss it are answered exactly
    rescore: bool = False  # of an accuracy bundle: candidates ranked by the head's own rows


SPARSE = Mode()
RUNGS = ("sparse", "escalated", "exact")  # how a row's answer was found


class TopK(NamedTuple):
    """The answer to an engine call, and what the call cost."""

    classes: NDArray[np.int64]  # [B,k]
    log_probs: NDArray[np.float32]  # [B,k] descending, ties by class id
    experts: NDArray[np.int64]  # [B] the gate's first choice
    gates: NDArray[np.float32]  # [B] its gate value
    gate_seconds: float
    expert_rows: NDArray[np.int64]  # [K] how many rows each expert was searched for
    expert_seconds: NDArray[np.float64]  # [K] how long that took
    # Only where a mode was asked for.
    # [B] experts searched: 0 where all classes were scanned from the start, and 1 of a row that was
    # escalated, whose first expert was searched before all classes were.
    searched: NDArray[np.int64] | None = None
    rungs: NDArray[np.uint8] | None = None  # [B] index into RUNGS


class QueueFull(DSSError):
    """More is waiting than the queue holds."""

    kind = Kind.OVERLOADED


class DeadlineExceeded(DSSError):
    """The answer would come too late."""

    kind = Kind.TIMEOUT


class EngineFailed(DSSError):
    """The engine raised something that is not the client's fault, or does not answer."""

    kind = Kind.FAILED


class EngineStopped(DSSError):
    """The engine takes no more requests: it is being closed."""

    kind = Kind.UNAVAILABLE


class TopKEngine(Protocol):
    """What the HTTP side needs of an engine."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def n_reachable(self) -> int: ...
    @property
    def objective(self) -> Objective: ...
    @property
    def can_exact(self) -> bool: ...
    @property
    def contract(self) -> "Contract | None": ...
    def check(
        self, hidden: NDArray[np.generic], k: int, experts: int = 1, mode: Mode = SPARSE
    ) -> None:
        """Raise the QueryError that `topk` would."""

    def row_scores(self, k: int, experts: int, mode: Mode = SPARSE) -> int:
        """About how many scores a row takes, at most: what its cost goes by."""

    def topk(
        self, hidden: NDArray[np.float32], k: int, experts: int = 1, mode: Mode = SPARSE
    ) -> TopK: ...


class Observer(Protocol):
    def executed(self, waits: Sequence[float], rows: int, seconds: float, result: TopK) -> None:
        """An engine call answered len(waits) requests, which had waited that many seconds.

        Never called by two threads at once.
        """

    def answered(self, mode: Mode, rungs: NDArray[np.uint8]) -> None:
        """The same call, if a mode was asked for: how each of its rows was answered."""


class Call(NamedTuple):
    """An engine call, by the clock `perf_counter`."""

    started: float
    ended: float
    gate_seconds: float
    expert_seconds: NDArray[np.float64]  # [K]


class Answer(NamedTuple):
    """One request's share of an engine call."""

    classes: NDArray[np.int64]  # [B,k]
    log_probs: NDArray[np.float32]  # [B,k]
    experts: NDArray[np.int64]  # [B]
    gates: NDArray[np.float32]  # [B]
    call: Call
    searched: NDArray[np.int64] | None = None  # [B], where a mode was asked for
    rungs: NDArray[np.uint8] | None = None  # [B] index into RUNGS, likewise


Answered = Answer | TopK
