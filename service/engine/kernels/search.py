"""Compiled loops: gate, search of experts, and the merge of what they found. Arrays only.

B rows, D hidden, K experts, V classes of an expert, R classes of all experts, k answers, g experts
searched for a row, T tasks: a row and an expert to search for it.
"""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from service.engine.kernels.float_products import (
    pointer,
    score_integers,
    score_many,
    score_one,
    score_one_nearby,
)
from service.engine.kernels.jit import (
    COUNTS,
    FLOAT_TABLE,
    FLOATS,
    INTEGER_TABLE,
    INTEGERS,
    ORDERED,
    ROWS,
    SECONDS,
    Floats,
    Integers,
    compiled,
    ordered,
)
from service.engine.kernels.scores import (
    best_of,
    best_rescored,
    best_shares,
    finite,
    normalise,
    rescored,
    scale,
)
from service.topk import NO_CLASS

SCORES_AT_ONCE = 2**20
RANKED_AT_ONCE = 64  # rows whose gate logits stay in the first caches
SORTED_BY_HAND = 32  # up to so many tasks
COMPARED = 64  # up to so many answers are looked through for a class that is there already

NOT_FINITE = -1
ZERO = np.float32(0)
MINUS_INFINITY = np.float32(-np.inf)
SMALLEST_GATE = np.finfo(np.float32).tiny

MONOTONIC = int(time.CLOCK_MONOTONIC)
clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))


@ordered
def nanoseconds(clock: Integers) -> int:
    """Of a monotonic clock; `clock` [2] is where the system writes them."""
    clock_gettime(MONOTONIC, clock.ctypes.data)
    return int(clock[0] * 1_000_000_000 + clock[1])


@ordered
def rank(
    hidden: Floats,  # [B,D]
    gate: Floats,  # [D K] by column
    gate_bias: Floats,  # [K]
    ranked: Integers,  # [B g] to fill in
    gates: Floats,  # [B g] to fill in
) -> int:
    """Each row's best experts and their share of the softmax. Returns the nanoseconds it took."""
    clock = np.empty(2, np.int64)
    started = nanoseconds(clock)
    n_experts, n = gate_bias.shape[0], hidden.shape[0]
    g = ranked.shape[0] // n
    together = min(n, RANKED_AT_ONCE)
    logits = np.empty((together, n_experts), np.float32)
    for first in range(0, n, together):
        count = min(together, n - first)
        for i in range(count):
            logits[i] = gate_bias
        if count == 1:
            score_one_nearby(hidden[first], gate, n_experts, logits[0])
        else:
            score_many(hidden, np.arange(first, first + count), gate, 0, n_experts, logits)
        for i in range(count):
            of_row = slice((first + i) * g, (first + i + 1) * g)
            best_shares(logits[i], ranked[of_row], gates[of_row])
    return nanoseconds(clock) - started


# --- searching experts -------------------------------------------------------------------------


@ordered
def rows_at_once(size: int) -> int:
    return max(1, SCORES_AT_ONCE // size)


@ordered
def group_tasks(experts: Integers, n_experts: int, order: Integers) -> None:
    """Fills in the tasks in the order of their experts [T]."""
    n = experts.shape[0]
    if n <= SORTED_BY_HAND:
        for t in range(n):
            at = t
            while at > 0 and experts[order[at - 1]] > experts[t]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = t
        return
    starts = np.zeros(n_experts + 1, np.int64)
    for t in range(n):
        starts[experts[t] + 1] += 1
    for e in range(n_experts):
        starts[e + 1] += starts[e]
    for t in range(n):
        order[starts[experts[t]]] = t
        starts[experts[t]] += 1


@ordered
def end_of_group(experts: Integers, order: Integers, begin: int) -> int:
    end = begin + 1
    while end < order.shape[0] and experts[order[end]] == experts[order[begin]]:
        end += 1
    return end


@ordered
def largest_needs(experts: Integers, order: Integers, offsets: Integers) -> tuple[int, int, int]:
    """Of all experts in use: the most classes, the most tasks at once, the most scores at once."""
    widest, most, largest = 1, 1, 1
    begin = 0
    while begin < order.shape[0]:
        end, e = end_of_group(experts, order, begin), experts[order[begin]]
        size = max(offsets[e + 1] - offsets[e], 1)
        together = min(end - begin, rows_at_once(size))
        widest, most = max(widest, size), max(most, together)
        largest = max(largest, together * size)
        begin = end
    return widest, most, largest


@ordered
def search(
    hidden: Floats,  # [B,D]
    rows: Integers,  # [T] of which row
    experts: Integers,  # [T] in which expert
    temperatures: Floats,  # [T] what a row's products are multiplied by
    distrust: Floats,  # [T] what is added to its log-probabilities
    weights: Floats,
    biases: Floats,
    quantised: NDArray[np.int8],
    scales: Floats,
    offsets: Integers,
    classes: NDArray[np.int32],
    n_classes: int,
    k: int,
    best_classes: Integers,  # [T,k] to fill in
    log_probs: Floats,  # [T,k] to fill in
    seconds: NDArray[np.float64],  # [K] to add to
    worked: Integers,  # [K] to add to
) -> None:
    """Search every task's expert for its row. Tasks of one expert are done together."""
    n_tasks, hidden_size = experts.shape[0], hidden.shape[1]
    # Allocations are a good part of a small call, so there are few.
    integers = np.empty(n_tasks + 2, np.int64)
    order, clock = integers[:n_tasks], integers[n_tasks:]
    group_tasks(experts, offsets.shape[0] - 1, order)
    widest, most, largest = largest_needs(experts, order, offsets)
    c = rescored(k, widest) if quantised.shape[0] > 0 else 0
    floats = np.empty(largest + c, np.float32)
    buffer, exact = floats[:largest], floats[largest:]
    more_integers = np.empty(k + most + c, np.int64)
    places, task_rows = more_integers[:k], more_integers[k : k + most]
    candidates = more_integers[k + most :]
    end = 0
    while end < n_tasks:
        first_task, end = end, end_of_group(experts, order, end)
        e = experts[order[first_task]]
        first, size = offsets[e], offsets[e + 1] - offsets[e]
        for t in range(first_task, end):
            for i in range(min(k, size), k):
                best_classes[order[t], i], log_probs[order[t], i] = NO_CLASS, MINUS_INFINITY
        if size == 0:
            continue
        started = nanoseconds(clock)
        begin, found = first_task, min(k, size)
        while begin < end:
            n = min(end - begin, rows_at_once(size))
            scores = buffer[: n * size].reshape((n, size))
            for i in range(n):
                task_rows[i] = rows[order[begin + i]]
                if biases.shape[0] > 0:
                    scores[i] = biases[first : first + size]
                else:
                    scores[i] = ZERO
            if quantised.shape[0] > 0:
                score_integers(hidden, task_rows[:n], quantised, scales, first, size, scores)
            elif n == 1:
                score_one(hidden[task_rows[0]], weights, first * hidden_size, size, scores[0])
            else:
                score_many(hidden, task_rows[:n], weights, first * hidden_size, size, scores)
            for i in range(n):
                t = order[begin + i]
                scale(scores[i], temperatures[t])
                if quantised.shape[0] > 0:
                    top = best_rescored(
                        hidden[task_rows[i]],
                        scores[i],
                        temperatures[t],
                        weights,
                        biases,
                        first,
                        found,
                        log_probs[t],
                        places,
                        candidates,
                        exact,
                    )
                else:
                    best_of(scores[i], found, log_probs[t], places)
                    top = log_probs[t, 0]
                normalise(
                    scores[i],
                    top,
                    distrust[t],
                    n_classes - size,
                    classes[first : first + size],
                    found,
                    best_classes[t],
                    log_probs[t],
                    places,
                )
            begin += n
        seconds[e] += (nanoseconds(clock) - started) * 1e-9
        worked[e] += end - first_task


@ordered
def merge(
    classes: Integers,  # [g,k] found in several experts, each in order
    log_probs: Floats,  # [g,k]
    best_classes: Integers,  # [k] to fill in
    best_log_probs: Floats,  # [k] to fill in
    heads: Integers,  # [g] scratch
    taken: NDArray[np.int8],  # [N] all zero, or empty if few answers are wanted
) -> None:
    """The k best of all, each class once with its best score; NO_CLASS where there are fewer."""
    n, k = classes.shape
    heads[:n] = 0
    count = 0
    while count < k:
        best = -1
        for i in range(n):
            if heads[i] == k or classes[i, heads[i]] == NO_CLASS:
                continue
            if best < 0:
                best = i
                continue
            score, leader = log_probs[i, heads[i]], log_probs[best, heads[best]]
            if score > leader or (
                score == leader and classes[i, heads[i]] < classes[best, heads[best]]
            ):
                best = i
        if best < 0:
            break
        found, score = classes[best, heads[best]], log_probs[best, heads[best]]
        heads[best] += 1
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
            for j in range(heads[i]):
                taken[classes[i, j]] = 0
    for i in range(count, k):
        best_classes[i], best_log_probs[i] = NO_CLASS, MINUS_INFINITY


@ordered
def marks(k: int, n_classes: int) -> NDArray[np.int8]:
    """For `merge`: where many answers are wanted, a mark for every class."""
    return np.zeros(n_classes if k > COMPARED else 0, np.int8)


@ordered
def merge_all(
    classes: Integers,  # [B g,k]
    log_probs: Floats,
    n_classes: int,
    best_classes: Integers,  # [B,k]
    best_log_probs: Floats,
) -> None:
    g = classes.shape[0] // best_classes.shape[0]
    heads, taken = np.empty(g, np.int64), marks(best_classes.shape[1], n_classes)
    for b in range(best_classes.shape[0]):
        found = slice(b * g, (b + 1) * g)
        merge(classes[found], log_probs[found], best_classes[b], best_log_probs[b], heads, taken)


@ordered
def log_distrust(gates: Floats, rank: int) -> np.float32:
    """How much less the gate trusts a row's expert at `rank` than its best one."""
    if rank == 0:
        return ZERO
    return np.float32(np.log(max(gates[rank], SMALLEST_GATE) / gates[0]))


@ordered
def fill_up(
    hidden: Floats,
    b: int,
    searched: int,
    gate: Floats,
    gate_bias: Floats,
    weights: Floats,
    biases: Floats,
    quantised: NDArray[np.int8],
    scales: Floats,
    offsets: Integers,
    classes: NDArray[np.int32],
    n_classes: int,
    best_classes: Integers,
    log_probs: Floats,
    seconds: NDArray[np.float64],
    worked: Integers,
) -> None:
    """Search a row's next-best experts until it has its k classes."""
    k, n_experts = best_classes.shape[0], gate_bias.shape[0]
    ranked, gates = np.empty(n_experts, np.int64), np.empty(n_experts, np.float32)
    rank(hidden[b : b + 1], gate, gate_bias, ranked, gates)
    heads, taken = np.empty(2, np.int64), marks(k, n_classes)
    row, temperature, distrust = np.array([b]), gates[:1], np.empty(1, np.float32)
    both_classes, both_log_probs = np.empty((2, k), np.int64), np.empty((2, k), np.float32)
    for place in range(searched, n_experts):
        if best_classes[k - 1] != NO_CLASS:
            return
        distrust[0] = log_distrust(gates, place)
        search(
            hidden, row, ranked[place : place + 1], temperature, distrust, weights, biases,
            quantised, scales, offsets, classes, n_classes, k, both_classes[1:],
            both_log_probs[1:], seconds, worked,
        )  # fmt: skip
        both_classes[0], both_log_probs[0] = best_classes, log_probs
        merge(both_classes, both_log_probs, best_classes, log_probs, heads, taken)


@ordered
def answer(
    hidden: Floats,  # [B,D]
    is_ranked: bool,
    ranked: Integers,  # [B g] the experts to search, to fill in unless they are known
    gates: Floats,  # [B g] likewise
    layer: Integers,  # as `Layer` writes it
    weights: Floats,  # [R D] of each expert by column, one after the other; by row if quantised
    best_classes: Integers,  # [B,k] to fill in
    log_probs: Floats,  # [B,k] to fill in
    seconds: NDArray[np.float64],  # [K] to fill in: how long each expert took
    worked: Integers,  # [K] to fill in: for how many rows
) -> int:
    """The k best classes of each row in its experts. Returns the gate's nanoseconds.

    The best gate value is the row's inverse temperature in whichever expert is searched. A row
    whose experts hold fewer than k classes between them goes on to its next-best ones. Where a row
    is not finite, nothing is computed and NOT_FINITE returned.
    """
    n, hidden_size = hidden.shape
    n_experts, n_rows, n_classes = layer[N_EXPERTS], layer[N_ROWS], layer[N_CLASSES]
    gate = carray(pointer(layer[GATE]), hidden_size * n_experts, np.float32)
    gate_bias = carray(pointer(layer[GATE_BIAS]), n_experts, np.float32)
    biases = carray(pointer(layer[BIASES]), layer[HAS_BIASES] * n_rows, np.float32)
    integers = layer[HAS_INTEGERS] * n_rows
    quantised = carray(pointer(layer[QUANTISED]), integers * hidden_size, np.int8)
    scales = carray(pointer(layer[SCALES]), integers, np.float32)
    offsets = carray(pointer(layer[OFFSETS]), n_experts + 1, np.int64)
    classes = carray(pointer(layer[CLASSES_OF]), n_rows, np.int32)

    gate_time = 0
    if not is_ranked:
        if not finite(hidden):
            return NOT_FINITE
        gate_time = rank(hidden, gate, gate_bias, ranked, gates)
    seconds[:], worked[:] = 0, 0
    k, g = best_classes.shape[1], ranked.shape[0] // n
    rows, floats = np.empty(n * g, np.int64), np.empty((2, n * g), np.float32)
    temperatures, distrust = floats[0], floats[1]
    for b in range(n):
        for place in range(g):
            t = b * g + place
            rows[t], temperatures[t] = b, gates[b * g]
            distrust[t] = log_distrust(gates[b * g : (b + 1) * g], place)
    found_classes, found_log_probs = best_classes, log_probs
    if g > 1:
        found_classes = np.empty((n * g, k), np.int64)
        found_log_probs = np.empty((n * g, k), np.float32)
    search(
        hidden, rows, ranked, temperatures, distrust, weights, biases, quantised, scales, offsets,
        classes, n_classes, k, found_classes, found_log_probs, seconds, worked,
    )  # fmt: skip
    if g > 1:
        merge_all(found_classes, found_log_probs, n_classes, best_classes, log_probs)
    if g == n_experts:
        return gate_time
    for b in range(n):
        if best_classes[b, k - 1] == NO_CLASS:
            fill_up(
                hidden, b, g, gate, gate_bias, weights, biases, quantised, scales, offsets,
                classes, n_classes, best_classes[b], log_probs[b], seconds, worked,
            )  # fmt: skip
    return gate_time


# --- what is called from Python ----------------------------------------------------------------

# A layer's arrays go by their addresses: to take seventeen arguments apart costs more than to
# search a small expert.
GATE, GATE_BIAS, N_EXPERTS, WEIGHTS, N_ROWS, BIASES, HAS_BIASES, QUANTISED, SCALES = range(9)
HAS_INTEGERS, OFFSETS, CLASSES_OF, N_CLASSES, FIELDS = range(9, 14)


class Layer:
    """The arrays of a layer, kept, and where they are."""

    def __init__(
        self,
        gate: Floats,  # [D K] by column
        gate_bias: Floats,  # [K]
        weights: NDArray[Any],  # [R D] float32, or float16 by their bits
        biases: Floats,  # [R], or empty
        quantised: NDArray[np.int8],  # [R D] by row, or empty
        scales: Floats,  # [R], or empty
        offsets: Integers,  # [K+1] in R
        classes: NDArray[np.int32],  # [R]
        n_classes: int,
    ) -> None:
        arrays: tuple[NDArray[Any], ...] = (
            gate, gate_bias, weights, biases, quantised, scales, offsets, classes,
        )  # fmt: skip
        if not all(array.flags.c_contiguous and array.flags.aligned for array in arrays):
            raise ValueError("The loops need arrays that are contiguous and aligned.")
        self.arrays = arrays
        self.table = np.zeros(FIELDS, np.int64)
        for field, array in zip(
            (GATE, GATE_BIAS, WEIGHTS, BIASES, QUANTISED, SCALES, OFFSETS, CLASSES_OF),
            arrays,
            strict=True,
        ):
            self.table[field] = array.ctypes.data
        self.table[[N_EXPERTS, N_ROWS, N_CLASSES]] = len(gate_bias), len(classes), n_classes
        self.table[[HAS_BIASES, HAS_INTEGERS]] = len(biases) > 0, len(scales) > 0


ANSWER = types.int64(
    ROWS, types.boolean, COUNTS, types.float32[::1], INTEGERS, INTEGER_TABLE, FLOAT_TABLE, SECONDS,
    COUNTS,
)  # fmt: skip


@compiled(ORDERED, types.int64(ROWS, FLOATS, FLOATS, COUNTS, types.float32[::1]))
def rank_experts(
    hidden: Floats, gate: Floats, gate_bias: Floats, ranked: Integers, gates: Floats
) -> int:
    """`rank` of rows that are finite; otherwise NOT_FINITE."""
    return rank(hidden, gate, gate_bias, ranked, gates) if finite(hidden) else NOT_FINITE


@cache
def answer_from(stored: type[np.generic]) -> Callable[..., int]:
    """`answer` of weights stored as float32, or as float16 by their bits (uint16)."""

    @compiled(ORDERED, ANSWER)
    def from_stored(
        hidden: Floats,
        is_ranked: bool,
        ranked: Integers,
        gates: Floats,
        layer: Integers,
        best_classes: Integers,
        log_probs: Floats,
        seconds: NDArray[np.float64],
        worked: Integers,
    ) -> int:
        weights = carray(pointer(layer[WEIGHTS]), layer[N_ROWS] * hidden.shape[1], stored)
        return answer(
            hidden, is_ranked, ranked, gates, layer, weights, best_classes, log_probs, seconds,
            worked,
        )  # fmt: skip

    return from_stored


answer_from(np.float32)  # float16 is rare, so it is compiled when a model needs it
