"""What an engine asks of whatever does its arithmetic.

B rows, b rows of a part, D hidden, g experts ranked, k answers.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

NO_CLASS = -1

Candidates = tuple[NDArray[np.int64], NDArray[np.float32]]  # classes and log-probabilities


@dataclass(frozen=True, slots=True)
class ExpertRun:
    """One execution of one expert."""

    expert: int
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TopK:
    classes: NDArray[np.int64]  # [B,k]
    log_probs: NDArray[np.float32]  # [B,k] descending, ties by class id
    experts: NDArray[np.int64]  # [B] the gate's first choice
    gates: NDArray[np.float32]  # [B] its gate value
    gate_seconds: float
    runs: tuple[ExpertRun, ...]


class Backend(ABC):
    """Answers for rows [.,D] of contiguous float32; safe to call from several threads.

    A row's answer does not depend on the other rows, bit for bit.
    """

    @abstractmethod
    def rank(
        self, hidden: NDArray[np.float32], ranks: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Each row's best experts and their gate values, best first: [B,g] each."""

    @abstractmethod
    def search(
        self,
        hidden: NDArray[np.float32],  # [b,D]
        experts: NDArray[np.int64],  # [b] where to look
        temperatures: NDArray[np.float32],  # [b] what a row's products are multiplied by
        distrust: NDArray[np.float32],  # [b] what is added to its log-probabilities
        k: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], list[ExpertRun]]:
        """The k best classes of each row's expert and their log-probabilities: [b,k] each.

        NO_CLASS and minus infinity where an expert holds fewer than k.
        """

    def first(self, hidden: NDArray[np.float32], k: int) -> TopK:
        """The k best classes of each row's best expert."""
        started = perf_counter()
        ranked, gates = self.rank(hidden, 1)
        gate_seconds = perf_counter() - started
        experts, gates = ranked[:, 0], gates[:, 0]  # [B] each
        trusted = np.zeros(len(hidden), np.float32)
        classes, log_probs, runs = self.search(hidden, experts, gates, trusted, k)
        return TopK(classes, log_probs, experts, gates, gate_seconds, tuple(runs))
