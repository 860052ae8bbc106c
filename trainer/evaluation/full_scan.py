"""The full softmax that a bundle replaces: its exact top-k, and a scan whose time is measured.

B query rows, D hidden, N classes, k answers.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.data.arrays import Head, VectorsInvalid, chunks
from trainer.evaluation import onnx_scan

LOGITS_AT_ONCE = 2**24  # 64 MB of them
LARGEST_MODEL = 2**31 - 2**20  # what one ONNX message can hold


class LogitsOverflow(VectorsInvalid):
    pass


def rows_at_once(n_classes: int) -> int:
    """How many rows of logits over so many classes are computed together: memory stays bounded."""
    return max(1, min(16384, LOGITS_AT_ONCE // n_classes))


class FullAnswers(NamedTuple):
    best: NDArray[np.int64]  # [B,k] descending, ties by class id
    log_probs: NDArray[np.float64]  # [B,a] of the classes asked for


def full_topk(hidden: NDArray[np.float32], head: Head, k: int) -> NDArray[np.int64]:
    """The k classes with the largest logits of each row, [B,k] descending, ties by class id."""
    found = np.empty((len(hidden), k), np.int64)
    for part, logits in _logits(hidden, head):
        found[part] = _largest(logits, k)
    return found


def full_answers(
    hidden: NDArray[np.float32], head: Head, k: int, asked: NDArray[np.int64]
) -> FullAnswers:
    """The k first classes of each row, and how probable those asked for [B,a] are."""
    found = FullAnswers(np.empty((len(hidden), k), np.int64), np.empty(asked.shape))
    for part, logits in _logits(hidden, head):
        found.best[part] = _largest(logits, k)
        top = logits.max(axis=1, keepdims=True)
        total = np.exp(logits - top).sum(axis=1, keepdims=True, dtype=np.float64)
        scores = np.take_along_axis(logits, asked[part], axis=1).astype(np.float64)
        found.log_probs[part] = scores - top - np.log(total)
    return found


def _logits(hidden: NDArray[np.float32], head: Head) -> Iterator[tuple[slice, Any]]:
    """Of some rows after the others, [b,N]."""
    for part in chunks(len(hidden), rows_at_once(len(head.weight))):
        with np.errstate(over="ignore", invalid="ignore"):  # refused by _largest
            logits = hidden[part] @ head.weight.T  # [b,N]
            if head.bias is not None:
                logits += head.bias
        yield part, logits


def _largest(logits: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    n_classes = logits.shape[1]
    found = np.argpartition(logits, n_classes - k, axis=1)[:, n_classes - k :]  # [b,k] in no order
    values = np.take_along_axis(logits, found, axis=1)
    if not np.isfinite(values).all():  # NaN counts as largest, so it would be among them
        raise LogitsOverflow(
            "The head's logits for these hidden vectors are too large for float32."
        )
    order = np.lexsort((found, -values), axis=1)
    found = np.take_along_axis(found, order, axis=1)
    # Among classes tied for the last place argpartition takes any; the lowest ids are wanted.
    tied = (logits >= values.min(axis=1, keepdims=True)).sum(axis=1) > k
    found[tied] = np.argsort(-logits[tied], axis=1, kind="stable")[:, :k]
    return found


def full_scan(head: Head, k: int) -> Callable[[NDArray[np.float32]], object] | None:
    """One ONNX Runtime call over all classes in one thread: a product and a top-k, nothing more.

    None if the head is too large for one ONNX model.
    """
    if head.weight.nbytes > LARGEST_MODEL:
        return None
    scan = onnx_scan.full(head)
    return lambda hidden: scan.topk(hidden, k)
