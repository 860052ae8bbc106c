"""Ranks candidates by the head's own rows, in compiled loops.

B rows, D hidden, N classes, c candidates, k answers.
"""

import numpy as np
from numba import types

from service.engine.kernels.answers import LOWEST_FLOAT
from service.engine.kernels.best import Best, keep
from service.engine.kernels.jit import (
    FLOAT_TABLE,
    FLOATS,
    INTEGER_TABLE,
    ORDERED,
    ROWS,
    Floats,
    Integers,
    compiled,
    given,
)
from service.engine.kernels.products.bounded_products import exact_product
from service.engine.kernels.products.float_products import fetch
from service.topk import NO_CLASS


@compiled(
    ORDERED,
    types.void(
        FLOATS, FLOATS, ROWS, given(types.int64, 2), given(types.float32, 2), INTEGER_TABLE,
        FLOAT_TABLE,
    ),
    allocates=True,
)  # fmt: skip
def rescore(
    weights: Floats,  # [N D]
    biases: Floats,  # [N], or empty
    hidden: Floats,  # [B,D]
    candidates: Integers,  # [B,c] classes, or NO_CLASS
    layer_log_probs: Floats,  # [B,c] what the layer gives them
    best_classes: Integers,  # [B,k] to fill in
    log_probs: Floats,  # [B,k] to fill in
) -> None:
    """The k best candidates by exact scores.

    Their log-probabilities share among the candidates, by the head's scores, what the layer gives
    to all candidates together, at most 1.
    """
    n, k = best_classes.shape
    width = hidden.shape[1]
    best = Best(best_classes, np.empty((n, k), np.float64), np.zeros(n, np.int64))
    scores = np.empty(candidates.shape[1], np.float64)
    for b in range(n):
        count, top, top_given = 0, -np.inf, -np.inf
        for i in range(candidates.shape[1]):
            if candidates[b, i] != NO_CLASS:
                fetch(weights, candidates[b, i] * width, width)
        for i in range(candidates.shape[1]):
            c = candidates[b, i]
            if c == NO_CLASS:
                continue
            score = exact_product(hidden[b], weights[c * width : (c + 1) * width])
            if biases.shape[0] > 0:
                score += biases[c]
            keep(best, b, score, c)
            scores[count] = score
            count += 1
            top, top_given = max(top, score), max(top_given, np.float64(layer_log_probs[b, i]))
        total, given_total = 0.0, 0.0
        for i in range(count):
            total += np.exp(scores[i] - top)
        for i in range(candidates.shape[1]):
            if candidates[b, i] != NO_CLASS:
                given_total += np.exp(np.float64(layer_log_probs[b, i]) - top_given)
        share = min(top_given + np.log(given_total), 0.0)
        normaliser = top + np.log(total) - share
        for i in range(best.counts[b]):
            difference = best.scores[b, i] - normaliser
            log_probs[b, i] = np.float32(max(difference, LOWEST_FLOAT))
