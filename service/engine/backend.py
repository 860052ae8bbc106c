"""The interface of the backends, which do an engine's arithmetic.

B rows, D hidden, K experts, k answers.
"""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from service.errors import NotFinite
from service.topk import TopK


class Backend(ABC):
    """Safe to call from several threads. A row's answer does not depend on the other rows."""

    @abstractmethod
    def topk(
        self, hidden: NDArray[np.float32], k: int, experts: int, needed: int | None = None
    ) -> TopK:
        """The k best classes of rows [B,D], contiguous, in their `experts` best experts.

        The best gate value is a row's inverse temperature in whichever expert is searched. To a
        lower-ranked expert's log-probabilities the log of its gate value relative to the best one
        is added. A row whose experts hold fewer than k classes between them goes on to its
        next-best ones; if only some answers are `needed`, until it has these, and NO_CLASS for the
        others.
        Raises NotFinite.
        """

    def one_row(self, hidden: NDArray[np.float32], k: int) -> TopK | None:
        """The same of a row [1,D] of float32 in its best expert, in less time; None where `topk`
        must be called, and where that says what is wrong with the row."""
        del hidden, k
        return None


def not_finite(hidden: NDArray[np.float32]) -> NotFinite:
    """The error that names the first row with a NaN or an infinity."""
    row = int(np.argmin(np.isfinite(hidden).all(axis=1)))
    return NotFinite(f"Row {row} holds a NaN or an infinity.")
