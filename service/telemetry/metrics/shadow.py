"""Answers a sample of the rows again with the full softmax, and counts which classes agree, and of
rows with a promised recall how many were missed.

A thread of the lowest priority does so. Requests never wait for it: rows that it cannot keep up
with are dropped, and counted as well.
"""

import logging
import math
import os
import random
import threading
from collections import deque
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from service.bundle.manifest import RECALL_AT
from service.shared_state.counters import Values
from service.topk import SPARSE, Mode, TopKEngine

logger = logging.getLogger(__name__)

ROWS, DROPPED, HITS = 0, 1, 2  # in its counters; then a count for each of RECALL_AT there can be
# In those of promised recalls: rows, classes looked for, those missed, those that may be missed.
CONTRACT_ROWS, CHECKED, MISSED, ALLOWED = 0, 1, 2, 3
CONTRACT_SIZE = 4
ROWS_AT_ONCE = 16
NICENESS = 19
CLOSE_SECONDS = 5.0

Asked = tuple[int, int, Mode]  # k, experts and mode
Row = tuple[NDArray[np.float32], Asked]  # [D], and how it was asked


def size(engine: TopKEngine) -> int:
    """How many counters it needs."""
    return HITS + sum(at <= engine.n_reachable for at in RECALL_AT)


class Shadow:
    """Compares an engine's answers with those of `full` in `full_mode`."""

    def __init__(
        self,
        engine: TopKEngine,
        full: TopKEngine,
        counters: Values,
        *,
        rate: float,
        most_rows: int,
        full_mode: Mode = SPARSE,
        contract_counters: Values | None = None,
    ) -> None:
        self._engine, self._full, self._full_mode = engine, full, full_mode
        self._k = min(max(RECALL_AT), engine.n_reachable)
        self._counters = counters
        unseen = np.zeros(CONTRACT_SIZE)
        self._contract_counters = unseen if contract_counters is None else contract_counters
        self._rate = rate
        self._most_rows = most_rows
        self._random = random.Random()  # noqa: S311
        self._skip = self._gap()  # rows until the next one is taken
        self._waiting: deque[Row] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None  # until there is a row for it

    def offer(self, hidden: NDArray[np.float32], k: int, experts: int, mode: Mode = SPARSE) -> None:
        """Rows [B,D] that were answered. Each is taken with the same chance, whatever its batch.

        Exact answers are not compared: they are the full softmax's.
        """
        if mode.exact:
            return
        asked = (k if mode.recall is not None else self._k, experts, mode)
        rows = len(hidden)
        while self._skip < rows:
            self._take(hidden[self._skip], asked)
            self._skip += 1 + self._gap()
        self._skip -= rows

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _gap(self) -> int:
        if self._rate >= 1.0:
            return 0
        return int(math.log1p(-self._random.random()) / math.log1p(-self._rate))

    def _take(self, row: NDArray[np.float32], asked: Asked) -> None:
        if len(self._waiting) >= self._most_rows:
            self._counters[DROPPED] += 1
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="shadow", daemon=True)
            self._thread.start()
        with self._wake:
            self._waiting.append((row.copy(), asked))
            self._wake.notify()

    # --- its thread --------------------------------------------------------------------------

    def _work(self) -> None:
        with suppress(OSError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            with self._wake:
                while not self._waiting and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
            try:
                self._compare(self._next())
            except Exception:
                logger.exception(
                    "Rows could not be compared with the full softmax; they are skipped."
                )

    def _next(self) -> list[Row]:
        """Some rows that were asked in the same way."""
        taken = [self._waiting.popleft()]
        while self._waiting and len(taken) < ROWS_AT_ONCE and self._waiting[0][1] == taken[0][1]:
            taken.append(self._waiting.popleft())
        return taken

    def _compare(self, rows: list[Row]) -> None:
        hidden = np.stack([row for row, _ in rows])  # [B,D]
        k, experts, mode = rows[0][1]
        served = self._engine.topk(hidden, k, experts, mode).classes  # [B,k]
        full = self._full.topk(hidden, k, 1, self._full_mode).classes  # [B,k]
        if mode.recall is not None:
            self._count_missed(served, full, mode.recall)
            return
        self._counters[ROWS] += len(rows)  # first, so that recall is never shown too high
        for place, at in enumerate(RECALL_AT[: len(self._counters) - HITS], HITS):
            same = served[:, :at, None] == full[:, None, :at]  # [B,at,at]
            self._counters[place] += int(same.sum())

    def _count_missed(
        self, served: NDArray[np.int64], full: NDArray[np.int64], recall: float
    ) -> None:
        """Of the full softmax's k best of each row [B,k], those that were not answered."""
        found = sum(
            int(np.isin(best, given).sum()) for best, given in zip(full, served, strict=True)
        )
        counters = self._contract_counters
        counters[CONTRACT_ROWS] += len(full)
        counters[CHECKED] += full.size
        counters[ALLOWED] += full.size * (1.0 - recall)
        counters[MISSED] += full.size - found  # last, so that too many are never shown
