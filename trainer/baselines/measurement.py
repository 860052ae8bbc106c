"""Measures what a search answers and costs on a split, against the head's own answers.

M rows, B rows at once, D hidden, N classes, k answers.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from service.bundle.manifest import RECALL_AT
from trainer.baselines.method import Search
from trainer.data.arrays import Head, Vectors, chunks
from trainer.data.files import write_json
from trainer.evaluation.full_scan import full_topk, rows_at_once
from trainer.evaluation.timing import timed

TIMED_ROWS = 500


@dataclass(frozen=True)
class Split:
    """Rows to measure on; they are read from disk as they are needed."""

    vectors: Vectors
    rows: NDArray[np.int64]  # [M] ascending
    head: Head

    def hidden(self, part: slice) -> NDArray[np.float32]:
        found = self.vectors.hidden[self.rows[part]]
        return np.ascontiguousarray(found, np.float32)

    def labels(self, part: slice) -> NDArray[np.int64]:
        return self.vectors.labels[self.rows[part]].astype(np.int64)

    def parts(self) -> list[slice]:
        return list(chunks(len(self.rows), rows_at_once(len(self.head.weight))))

    @cached_property
    def best(self) -> NDArray[np.int64]:
        """The head's own answers, [M,10]."""
        parts = (full_topk(self.hidden(part), self.head, RECALL_AT[-1]) for part in self.parts())
        return np.concatenate(list(parts))

    @cached_property
    def full_accuracy(self) -> dict[str, float]:
        labels = self.labels(slice(None))[:, None]
        return {str(k): float((self.best[:, :k] == labels).any(1).mean()) for k in RECALL_AT}


def spread(n_rows: int, wanted: int | None) -> NDArray[np.int64]:
    """Evenly spread rows; None for all."""
    if wanted is None or wanted >= n_rows:
        return np.arange(n_rows)
    return np.linspace(0, n_rows - 1, wanted).astype(np.int64)


def measured(search: Search, split: Split) -> dict[str, Any]:
    """Accuracy, precision against the head's own answers, and FLOPs at the longest answer."""
    hits, shared, cost = dict.fromkeys(RECALL_AT, 0), dict.fromkeys(RECALL_AT, 0), 0.0
    for part in split.parts():
        hidden, labels, best = split.hidden(part), split.labels(part)[:, None], split.best[part]
        longest, spent = search.counted(hidden, RECALL_AT[-1])
        cost += spent
        for k in RECALL_AT:
            whole = k == RECALL_AT[-1] or search.nested
            answer = longest[:, :k] if whole else search.topk(hidden, k)  # [B,k]
            hits[k] += int((answer == labels).sum())
            shared[k] += int((answer[:, :, None] == best[:, None, :k]).sum())
    rows = len(split.rows)
    n_classes, hidden_size = split.head.weight.shape
    return {
        "accuracy": {str(k): hits[k] / rows for k in RECALL_AT},
        "precision": {str(k): shared[k] / (k * rows) for k in RECALL_AT},
        "flops_speedup": n_classes * hidden_size * rows / cost,
    }


def latencies(searches: list[Search], split: Split) -> list[float]:
    """Median microseconds of one row's longest answer, one thread, all searches in turns."""
    rows = split.rows[spread(len(split.rows), TIMED_ROWS)]
    single = [np.asarray(split.vectors.hidden[row : row + 1], np.float32) for row in rows]

    def call(search: Search) -> Callable[[], object]:
        queries = cycle(single)
        return lambda: search.topk(next(queries), RECALL_AT[-1])

    with threadpool_limits(1):
        return [round(time, 1) for time in timed(*(call(search) for search in searches))]


def digest(*arrays: NDArray[Any]) -> str:
    """Of the arrays' contents, read once and in pieces."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype}{array.shape}".encode())
        for part in chunks(len(array)):
            found.update(np.ascontiguousarray(array[part]).data)
    return found.hexdigest()


class Record:
    """Finished measurements on disk, so that a stopped comparison goes on where it was."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: dict[str, dict[str, Any]] = {}
        if path.exists():
            self._kept = json.loads(path.read_text())

    def get(self, key: str) -> dict[str, Any] | None:
        return self._kept.get(key)

    def put(self, key: str, figures: dict[str, Any]) -> None:
        self._kept[key] = figures
        write_json(self._path, self._kept)
