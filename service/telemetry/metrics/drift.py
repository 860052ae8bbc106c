"""How far the traffic of the last minutes is from the rows that training measured.

Distance is the population stability index of two sets of shares p and q: the sum of
(p - q) ln(p / q) over all bins. It is 0 for equal shares; below 0.1 is commonly called no shift,
above 0.25 a large one.
"""

from collections import deque

import numpy as np

from service.bundle.manifest import TrainingFacts
from service.engine.kernels.call_counts import GATE_BINS
from service.shared_state.counters import Values

STEP_SECONDS = 10.0  # between looks: by so much a window may be too long
LEAST_ROWS, LEAST_ROWS_OF_A_BIN = 1000, 20  # fewer are more noise than shift
UNSEEN = 0.5  # a bin is taken to have had so many more rows, live and trained: none is impossible


def stability_index(counts: Values, shares: Values) -> float | None:
    """Of rows counted in bins; none if they are too few to tell."""
    total = float(counts.sum())
    if total < max(LEAST_ROWS, LEAST_ROWS_OF_A_BIN * len(counts)):
        return None
    live = counts + UNSEEN
    trained = shares / shares.sum() * total + UNSEEN
    live, trained = live / live.sum(), trained / trained.sum()
    return float(((live - trained) * np.log(live / trained)).sum())


class Window:
    """What was counted in the last so many seconds, of counts that only grow."""

    def __init__(self, seconds: float, now: float, counts: Values) -> None:
        self._seconds = seconds
        self._looks = deque([(now, counts)])

    def is_due(self, now: float) -> bool:
        """Whether it is time for another look."""
        return now - self._looks[-1][0] >= min(STEP_SECONDS, self._seconds)

    def look(self, now: float, counts: Values) -> None:
        self._looks.append((now, counts))
        while len(self._looks) > 1 and now - self._looks[1][0] >= self._seconds:
            self._looks.popleft()

    def since(self, counts: Values) -> Values:
        return np.maximum(counts - self._looks[0][1], 0.0)


class Trained:
    """What training measured, as shares of rows."""

    def __init__(self, facts: TrainingFacts) -> None:
        self.experts = np.array(facts.utilization)  # [K]
        self.edges = np.full(GATE_BINS - 1, np.inf, np.float32)
        self.gates: Values | None = None
        if facts.gates is not None:
            self.edges[: len(facts.gates.edges)] = facts.gates.edges
            self.gates = np.array(facts.gates.shares)

    def expert_drift(self, counts: Values) -> float | None:
        """Of rows by the expert that the gate chose first [K]."""
        return stability_index(counts, self.experts) if self.experts.any() else None

    def gate_drift(self, counts: Values) -> float | None:
        """Of rows by how sure the gate was [GATE_BINS]."""
        if self.gates is None or not self.gates.any():
            return None
        return stability_index(counts[: len(self.gates)], self.gates)
