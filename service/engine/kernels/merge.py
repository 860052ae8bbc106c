"""Joins what several experts found for a row, in compiled loops.

B rows, N classes, k answers, g experts searched for a row.
"""

import numpy as np
from numpy.typing import NDArray

from service.engine.kernels.jit import Floats, Integers, allocating, ordered
from service.topk import NO_CLASS

COMPARED = 64  # up to so many answers are looked through for a class that is there already
MINUS_INFINITY = np.float32(-np.inf)


@allocating
def marks(k: int, n_classes: int) -> NDArray[np.int8]:
    """For `merge`: a mark for every class [N] if many answers are wanted, otherwise none."""
    return np.zeros(n_classes if k > COMPARED else 0, np.int8)


@ordered
def merge(
    classes: Integers,  # [g,k] found in several experts, each in order
    log_probs: Floats,  # [g,k]
    best_classes: Integers,  # [k] to fill in
    best_log_probs: Floats,  # [k] to fill in
    cursors: Integers,  # [g] scratch: how many of each were looked at
    taken: NDArray[np.int8],  # `marks`, all zero
) -> None:
    """The k best of all, each class once with its best score; NO_CLASS where there are fewer."""
    n, k = classes.shape
    cursors[:n] = 0
    count = 0
    while count < k:
        best = -1
        for i in range(n):
            if cursors[i] == k or classes[i, cursors[i]] == NO_CLASS:
                continue
            if best < 0:
                best = i
                continue
            score, leader = log_probs[i, cursors[i]], log_probs[best, cursors[best]]
            if score > leader or (
                score == leader and classes[i, cursors[i]] < classes[best, cursors[best]]
            ):
                best = i
        if best < 0:
            break
        found, score = classes[best, cursors[best]], log_probs[best, cursors[best]]
        cursors[best] += 1
        known = False
        if taken.shape[0] > 0:
            known = taken[found] == 1
            taken[found] = 1
        else:
            for i in range(count):
                known = known or best_classes[i] == found
        if not known:
            best_classes[count], best_log_probs[count] = found, score
            count += 1
    if taken.shape[0] > 0:
        for i in range(n):
            for j in range(cursors[i]):
                taken[classes[i, j]] = 0
    for i in range(count, k):
        best_classes[i], best_log_probs[i] = NO_CLASS, MINUS_INFINITY


@allocating
def merge_all(
    classes: Integers,  # [B g,k]
    log_probs: Floats,  # [B g,k]
    n_classes: int,
    best_classes: Integers,  # [B,k] to fill in
    best_log_probs: Floats,  # [B,k] to fill in
) -> None:
    """`merge` of every row."""
    g = classes.shape[0] // best_classes.shape[0]
    cursors, taken = np.empty(g, np.int64), marks(best_classes.shape[1], n_classes)
    for b in range(best_classes.shape[0]):
        found = slice(b * g, (b + 1) * g)
        merge(classes[found], log_probs[found], best_classes[b], best_log_probs[b], cursors, taken)
