"""The head's k best by float64 scores of all classes, ties by class id, at the speed of float32.

All classes are scored in float32. A sum of n products, in whatever order it is made, is off by at
most g = n u / (1 - n u) times the sum of their sizes (Higham, Accuracy and Stability of Numerical
Algorithms, section 3.1), u = 2^-24; and that sum is at most |h| |w|, by Cauchy and Schwarz. So of
a row's k best none has a float32 score more than twice that below the k-th largest one: only those
classes are scored again, in float64, where products of float32 numbers are exact.

B rows, D hidden, N classes, k answers, P pairs of a row and a class.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.data.arrays import Head

UNIT = 2.0**-24  # of what float32 rounds
MORE = 1 + 2.0**-20  # than the float64 rounding in the bound itself
TINY = 1e-30  # more than what numbers next to zero lose


def best(hidden: NDArray[np.float32], head: Head, k: int) -> NDArray[np.int64]:
    """[B,k], best first. The caller sees to it that B x N numbers fit in memory."""
    scores = hidden @ head.weight.T  # [B,N]
    if head.bias is not None:
        scores += head.bias
    kth = torch.from_numpy(scores).topk(k, dim=1).values[:, -1].double().numpy()  # [B]
    reach = np.nextafter((kth - 2 * off_by(hidden, head)).astype(np.float32), np.float32(-np.inf))
    rows, classes = np.nonzero(scores >= reach[:, None])  # [P] rows ascending
    order = np.lexsort((classes, -exact_scores(hidden, head, rows, classes), rows))
    starts = np.searchsorted(rows, np.arange(len(hidden)))  # [B]
    return classes[order][starts[:, None] + np.arange(k)]


def off_by(hidden: NDArray[np.float32], head: Head) -> NDArray[np.float64]:
    """[B] how far a row's float32 scores may be from the exact ones, at most."""
    terms = head.weight.shape[1] + 1  # the bias is one more
    lengths = [
        np.sqrt(np.einsum("nd,nd->n", a, a, dtype=np.float64)) for a in (hidden, head.weight)
    ]
    largest = lengths[0] * lengths[1].max()
    if head.bias is not None:
        largest += np.abs(head.bias).max()
    return terms * UNIT / (1 - terms * UNIT) * MORE * largest + TINY


def exact_scores(
    hidden: NDArray[np.float32],
    head: Head,
    rows: NDArray[np.int64],  # [P]
    classes: NDArray[np.int64],  # [P]
) -> NDArray[np.float64]:
    """[P], by the same order of additions for every class, so that equal rows have equal scores."""
    products = hidden[rows].astype(np.float64) * head.weight[classes]  # [P,D]
    scores = products.sum(axis=1)
    return scores if head.bias is None else scores + head.bias[classes]
