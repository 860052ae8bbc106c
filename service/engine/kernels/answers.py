"""Rows while they are being answered: their best classes so far and what their normaliser needs.

B rows, k answers.
"""

from typing import NamedTuple

import numpy as np

from service.engine.kernels.best import Best
from service.engine.kernels.borrowed import words
from service.engine.kernels.jit import Floats, Integers, ordered
from service.engine.kernels.products.bounded_products import Doubles

LOWEST_FLOAT = np.float64(np.finfo(np.float32).min)


class Answers(NamedTuple):
    """Of each row, while it is being answered."""

    best: Best
    logsumexps: Doubles  # [B] of the list that was searched last
    largest: Doubles  # [B] of the experts' logsumexps
    outside: Doubles  # [B] the estimate of all other classes, of the expert with the largest
    normalisers: Doubles  # [B]


@ordered
def make_answers(space: Doubles, best_classes: Integers) -> Answers:
    n, k = best_classes.shape
    counts = words(space, (k + 4) * n, n)
    counts[:] = 0
    best = Best(best_classes, space[4 * n : (k + 4) * n].reshape((n, k)), counts)
    space[n : 2 * n] = -np.inf  # largest
    return Answers(best, space[:n], space[n : 2 * n], space[2 * n : 3 * n], space[3 * n : 4 * n])


@ordered
def fill_in_log_probs(answers: Answers, b: int, log_probs: Floats) -> None:
    for i in range(answers.best.counts[b]):
        difference = answers.best.scores[b, i] - answers.normalisers[b]
        log_probs[b, i] = np.float32(max(difference, LOWEST_FLOAT))


@ordered
def answers_words(n: int, k: int) -> int:
    """How many words `make_answers` needs."""
    return (k + 5) * n
