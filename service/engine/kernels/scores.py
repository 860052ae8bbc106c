"""Compiled loops from scores to answers: exponentials, the best of many, normalising.

B rows, D hidden, K experts, V classes of an expert, k answers, c candidates.
"""

import numpy as np
from numba import types
from numpy.typing import NDArray

from service.bundle.quantisation import RESCORED_AT_LEAST, RESCORED_PER_ANSWER
from service.engine.kernels.jit import (
    REORDERED,
    ROWS,
    Floats,
    Integers,
    allocating,
    compiled,
    ordered,
    reordered,
)
from service.engine.kernels.products.float_products import dot, fetch
from service.engine.kernels.products.intrinsics import float_of_bits, larger

LOOKED_AT = 32  # scores together, of which often none is among the best
INSERTED = 128  # up to so many answers are kept in order as they are found, more in a heap

ZERO, ONE = np.float32(0), np.float32(1)
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # their sum is ln 2
ROUNDER = np.float32(12582912)  # adding and subtracting it rounds to a whole number
LOWEST = np.float32(-87)  # e to that is next to nothing
C2, C3, C4, C5, C6 = (np.float32(1 / factorial) for factorial in (2, 6, 24, 120, 720))


@reordered
def finite(hidden: Floats) -> bool:
    """Whether no number is a NaN or infinite: 0 x would be a NaN, and so would the sum."""
    total = ZERO
    for b in range(hidden.shape[0]):
        row = hidden[b]
        for d in range(row.shape[0]):
            total += row[d] * ZERO
    return bool(total == ZERO)


@compiled(REORDERED, types.boolean(ROWS))
def all_finite(hidden: Floats) -> bool:
    """`finite`, to be called from Python."""
    return finite(hidden)


@ordered
def scale(x: Floats, by: float) -> None:
    for v in range(x.shape[0]):
        x[v] = x[v] * by


# --- sums of exponentials ----------------------------------------------------------------------


@ordered
def exponential(t: np.float32) -> np.float32:
    """e^t of t no larger than 0.

    e^t = 2^n e^r with |r| < 0.35, where seven terms of the series are enough.
    """
    t = max(t, LOWEST)
    n = (t * LOG2_E + ROUNDER) - ROUNDER
    r = (t - n * LN2_HIGH) - n * LN2_LOW
    fraction = ONE + r * (ONE + r * (C2 + r * (C3 + r * (C4 + r * (C5 + r * C6)))))
    power: np.float32 = float_of_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    return fraction * power


@reordered
def sum_of_exponentials(x: Floats, shift: np.float32) -> np.float32:
    """Of e^(x - shift), x no larger than shift."""
    total = ZERO
    for v in range(x.shape[0]):
        total += exponential(x[v] - shift)
    return total


# --- the best ----------------------------------------------------------------------------------


@compiled({*REORDERED, "nnan"})
def largest(x: Floats) -> np.float32:
    found: np.float32 = x[0]
    for v in range(1, x.shape[0]):
        found = larger(found, x[v])
    return found


@ordered
def insert(score: np.float32, place: int, at: int, values: Floats, places: Integers) -> None:
    """Among the `at` values before it, which are in order."""
    while at > 0 and values[at - 1] < score:
        values[at] = values[at - 1]
        places[at] = places[at - 1]
        at -= 1
    values[at] = score
    places[at] = place


@ordered
def sink(values: Floats, places: Integers, at: int, size: int) -> None:
    """Puts a heap in order from `at` on, whose first one is the worst: the later among equals."""
    value, place = values[at], places[at]
    while 2 * at + 1 < size:
        child = 2 * at + 1
        other = child + 1
        if other < size and (
            values[other] < values[child]
            or (values[other] == values[child] and places[other] > places[child])
        ):
            child = other
        if value < values[child] or (value == values[child] and place > places[child]):
            break
        values[at], places[at] = values[child], places[child]
        at = child
    values[at], places[at] = value, place


@ordered
def best_in_heap(x: Floats, k: int, values: Floats, places: Integers) -> None:
    """`best_of` for many answers."""
    for v in range(k):
        values[v], places[v] = x[v], v
    for at in range(k // 2 - 1, -1, -1):
        sink(values, places, at, k)
    for begin in range(k, x.shape[0], LOOKED_AT):
        end = min(begin + LOOKED_AT, x.shape[0])
        if largest(x[begin:end]) > values[0]:
            for v in range(begin, end):
                if x[v] > values[0]:
                    values[0], places[0] = x[v], v
                    sink(values, places, 0, k)
    for size in range(k - 1, 0, -1):
        values[0], values[size] = values[size], values[0]
        places[0], places[size] = places[size], places[0]
        sink(values, places, 0, size)


@ordered
def best_of(x: Floats, k: int, values: Floats, places: Integers) -> None:
    """The k largest of x and where they are, best first, the earlier one first among equals."""
    if k > INSERTED:
        best_in_heap(x, k, values, places)
        return
    for v in range(k):
        insert(x[v], v, v, values, places)
    for begin in range(k, x.shape[0], LOOKED_AT):
        end = min(begin + LOOKED_AT, x.shape[0])
        if largest(x[begin:end]) > values[k - 1]:
            for v in range(begin, end):
                if x[v] > values[k - 1]:
                    insert(x[v], v, k - 1, values, places)


@ordered
def best_shares(
    logits: Floats,
    places: Integers,
    shares: Floats,
) -> None:
    """The largest logits and their shares of the softmax, as many as `places` has room for."""
    # By logit: shares far behind the best underflow to equal zeros.
    best_of(logits, places.shape[0], shares, places)
    top = shares[0]
    total = sum_of_exponentials(logits, top)
    for rank in range(places.shape[0]):
        shares[rank] = np.exp(shares[rank] - top) / total


@ordered
def rescored(k: int, size: int) -> int:
    """How many of an expert's int8 scores are made exact."""
    return min(max(RESCORED_PER_ANSWER * k, RESCORED_AT_LEAST), size)


@allocating
def best_rescored(
    weights: Floats,  # [R D] by row
    biases: Floats,  # [R], or empty
    first: int,  # where the expert's classes begin
    h: Floats,  # [D]
    temperature: float,
    scores: Floats,  # [V] by int8; those that are scored again are replaced
    k: int,
    log_probs: Floats,  # [k] to fill in with the best scores
    places: Integers,  # [k] to fill in with where they are
    candidates: Integers,  # [c] scratch
    exact: Floats,  # [c] scratch
) -> np.float32:
    """The k best of the candidates by int8, scored again with their float32 rows.

    Returns a bound that no score exceeds.
    """
    width, c = h.shape[0], rescored(k, scores.shape[0])
    best_of(scores, c, exact, candidates)
    top = exact[0]
    candidates[:c].sort()  # so that equal scores are answered in the order of their classes
    for i in range(c):  # all are asked for before the first is used
        row = first + candidates[i]
        fetch(weights, row * width, width)
    for i in range(c):
        row = first + candidates[i]
        score = dot(h, weights[row * width : (row + 1) * width])
        if biases.shape[0] > 0:
            score = score + biases[row]
        exact[i] = score * temperature
        scores[candidates[i]] = exact[i]
    best_of(exact[:c], k, log_probs, places)
    for i in range(k):
        places[i] = candidates[places[i]]
    return max(top, log_probs[0])


@ordered
def normalise(
    scores: Floats,
    top: np.float32,
    log_ratio: float,
    absent: int,
    classes: NDArray[np.int32],
    k: int,
    best_classes: Integers,
    log_probs: Floats,
    places: Integers,
) -> None:
    """From an expert's scores [V], none above `top`, to log-probabilities of the k best of them.

    Each of the `absent` classes has score 0, so it adds 1 to the normaliser.
    """
    if absent > 0:
        top = top if top > ZERO else ZERO
    total = sum_of_exponentials(scores, top)
    if absent > 0:
        total += np.float32(absent) * np.exp(-top)
    normaliser = top + np.log(total)
    for i in range(k):
        log_probs[i] = (log_probs[i] - normaliser) + log_ratio
        best_classes[i] = classes[places[i]]
        at = i  # rounding may have made a new tie, which goes by class
        while (
            at > 0
            and log_probs[at] == log_probs[at - 1]
            and best_classes[at] < best_classes[at - 1]
        ):
            later = best_classes[at - 1]
            best_classes[at - 1] = best_classes[at]
            best_classes[at] = later
            at -= 1
