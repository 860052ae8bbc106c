"""A head and its held-out rows, which everybody is asked, and how many of its answers are found.

M rows, D hidden, N classes, k answers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.engines.contestants import OURS, Classes, Contestant
from benchmarks.engines.timing import Rows
from service.errors import DSSError
from trainer.baselines.measurement import spread
from trainer.capture.folder import Captured
from trainer.data.arrays import Head, chunks, open_head, open_vectors
from trainer.evaluation.full_scan import full_topk, rows_at_once

KS = (1, 10, 100)
AT_ONCE = 256


class RowsMissing(DSSError):
    pass


@dataclass(frozen=True)
class Queries:
    head: Head
    hidden: Rows  # [M,D]
    best: NDArray[np.int64]  # [M,100] the head's own answers, or as many as it has classes
    wide_head: Head  # the same for libraries that know no bias: it is another column
    wide: Rows  # [M,D+...]

    @property
    def ks(self) -> list[int]:
        return [k for k in KS if k <= self.best.shape[1]]


def read_queries(captured: Captured, rows: int) -> Queries:
    """Held-out rows of a capture, evenly spread: of the test split, else of the validation."""
    hidden, labels = captured.test_hidden, captured.test_labels
    if hidden is None or labels is None:
        hidden, labels = captured.valid_hidden, captured.valid_labels
    if hidden is None or labels is None:
        raise RowsMissing(f"{captured.folder} has no held-out rows; capture it with valid=.")
    head = open_head(captured.head, captured.bias)
    vectors = open_vectors(
        hidden, labels, n_classes=captured.n_classes, hidden_size=captured.hidden_size
    )
    places = spread(len(vectors.labels), rows)
    return queries(head, np.ascontiguousarray(vectors.hidden[places], np.float32))


def queries(head: Head, hidden: Rows) -> Queries:
    best = full_topk(hidden, head, min(KS[-1], len(head.weight)))
    return Queries(head, hidden, best, *widened(head, hidden))


def widened(head: Head, hidden: Rows) -> tuple[Head, Rows]:
    """The bias as a column, and zeros up to an even width, which short codes need."""
    columns, ones = [head.weight], [hidden]
    if head.bias is not None:
        # As large as the hidden vectors' numbers are, so that codes of them lose little.
        largest = np.float32(max(np.abs(hidden).max(), np.finfo(np.float32).tiny))
        columns.append((head.bias / largest)[:, None])
        ones.append(np.full((len(hidden), 1), largest, np.float32))
    if sum(part.shape[1] for part in columns) % 2:
        columns.append(np.zeros((len(head.weight), 1), np.float32))
        ones.append(np.zeros((len(hidden), 1), np.float32))
    weight, rows = (
        np.ascontiguousarray(np.concatenate(parts, axis=1)) for parts in (columns, ones)
    )
    return Head(weight, None), rows


# --- recall ------------------------------------------------------------------------------------


def missed_by(contestant: Contestant, data: Queries, places: slice = slice(None)) -> int:
    """How many of the head's own k best, of the rows at these places, are not among its answers."""
    contestant.prepare()
    rows, best = rows_of(contestant, data)[places], data.best[places, : contestant.k]
    found = 0
    for part in chunks(len(rows), min(AT_ONCE, rows_at_once(len(data.head.weight)))):
        found += shared(contestant.answers(np.ascontiguousarray(rows[part])), best[part])
    return best.size - found


def shared(answers: Classes, best: NDArray[np.int64]) -> int:
    """How many of best [M,k] are among answers [M,k]; an answer given twice counts once."""
    found = np.sort(answers, axis=1)
    found[:, 1:][found[:, 1:] == found[:, :-1]] = -1
    both = np.sort(np.concatenate([found, best], axis=1), axis=1)
    return int(((both[:, 1:] == both[:, :-1]) & (both[:, 1:] >= 0)).sum())


def rows_of(contestant: Contestant, data: Queries) -> Rows:
    return data.hidden if contestant.kind == OURS else data.wide
