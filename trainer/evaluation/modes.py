"""What exact answers and promised recall give and cost on a user's vectors.

B query rows, D hidden, k answers.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.bundle.manifest import RECALL_AT
from service.engine import Engine
from service.topk import RUNGS, Mode


def asked_modes(exact: bool, recalls: tuple[float, ...]) -> list[Mode]:
    return [Mode(exact=True)] * exact + [Mode(recall=recall) for recall in recalls]


def name_of(mode: Mode) -> str:
    return "exact" if mode.exact else f"recall {mode.recall:g}"


class ModeCounts:
    """Sums over the rows seen so far, by k."""

    def __init__(self, engine: Engine, mode: Mode) -> None:
        self._engine, self._mode = engine, mode
        self._ks = [k for k in RECALL_AT if k <= engine.n_classes]
        self._hits, self._shared = dict.fromkeys(self._ks, 0), dict.fromkeys(self._ks, 0)
        self._rungs = {k: np.zeros(len(RUNGS), np.int64) for k in self._ks}

    def add(
        self,
        hidden: NDArray[np.float32],  # [B,D]
        labels: NDArray[np.int64],  # [B,1]
        best: NDArray[np.int64],  # [B,10] of the full softmax
    ) -> None:
        for k in self._ks:
            answer = self._engine.topk(hidden, k, 1, self._mode)
            self._hits[k] += int((answer.classes == labels).sum())
            self._shared[k] += int((answer.classes[:, :, None] == best[:, None, :k]).sum())
            assert answer.rungs is not None  # noqa: S101
            self._rungs[k] += np.bincount(answer.rungs, minlength=len(RUNGS))

    def figures(self, rows: int, latency_us: float) -> dict[str, Any]:
        """`rungs` are the shares of rows that were answered in each way, by k."""
        return {
            "asked": name_of(self._mode),
            "accuracy": {
                str(k): self._hits[k] / rows if k in self._ks else None for k in RECALL_AT
            },
            "precision": {
                str(k): self._shared[k] / (k * rows) if k in self._ks else None for k in RECALL_AT
            },
            "rungs": {
                str(k): dict(zip(RUNGS, (self._rungs[k] / rows).tolist(), strict=True))
                for k in self._ks
            },
            "latency_us": round(latency_us, 1),
        }


def words(figures: dict[str, Any], k: int) -> str:
    """For people: the time of one row, and how rows were answered."""
    shares = figures["rungs"][str(k)]
    ways = ", ".join(f"{share:.1%} {rung}" for rung, share in shares.items() if share)
    return f"{figures['latency_us']:,.1f} us one row, top {k}; {ways}"
