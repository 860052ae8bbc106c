"""Compiled loops: gate, scan, log-sum-exp and top-k. They know arrays only.

A matrix of V rows is stored by column, [D,V]: W h is then a sum over D of scaled columns, added in
the same order for one row and for many. So a row's answer does not depend on its batch, bit for
bit, and sums need not be gathered from the lanes of a vector.

B rows, D hidden, K experts, V classes of an expert, R rows of all experts, k answers, T tasks: a
row and the expert to search for it.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])
Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

ONE_ROW_TILE = 1024  # columns whose sums stay in the first cache
TILE = 128  # columns of a matrix that stay in the second cache while many rows pass
SCORES_AT_ONCE = 2**20
INSERTED = 128  # up to so many answers are kept in order as they are found

ZERO, ONE = np.float32(0), np.float32(1)
MINUS_INFINITY = np.float32(-np.inf)
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # their sum is ln 2
ROUNDER = np.float32(12582912)  # adding and subtracting it rounds to a whole number
LOWEST = np.float32(-87)  # e to that is next to nothing
C2, C3, C4, C5, C6 = (np.float32(1 / factorial) for factorial in (2, 6, 24, 120, 720))

MONOTONIC = int(time.CLOCK_MONOTONIC)
clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))


def compiled(fastmath: set[str], signature: object = None) -> Callable[[Function], Function]:
    """Machine code, kept on disk where there is a place for it; the interpreter is let go.

    What has a signature is compiled when this module is imported, never by a request.
    """

    def compile_it(function: Function) -> Function:
        try:
            made = njit(signature, nogil=True, cache=True, fastmath=fastmath)(function)
        except RuntimeError:  # no folder can be written
            made = njit(signature, nogil=True, fastmath=fastmath)(function)
        return cast(Function, made)

    return compile_it


# A product and a sum may be fused, but no sum is reordered: vectors and single numbers agree.
ORDERED = {"contract", "nsz"}
ordered = compiled(ORDERED)
# Sums may be reordered: only for what is computed by the same loop in every case.
reordered = compiled({*ORDERED, "reassoc"})


def given(scalar: types.Type, dimensions: int) -> types.Type:
    """An argument that is only read, so that it may be a part of a file or of a message."""
    return types.Array(scalar, dimensions, "C", readonly=True)


ROWS, FLOATS, INTEGERS = given(types.float32, 2), given(types.float32, 1), given(types.int64, 1)
CLASSES = given(types.int32, 1)
COUNT = types.int64
SECONDS = types.float64[::1]
INTEGER_TABLE, FLOAT_TABLE = types.int64[:, ::1], types.float32[:, ::1]


@ordered
def nanoseconds(clock: Integers) -> int:
    """Of a monotonic clock; `clock` [2] is where the system writes them."""
    clock_gettime(MONOTONIC, clock.ctypes.data)
    return int(clock[0] * 1_000_000_000 + clock[1])


# --- products ----------------------------------------------------------------------------------


@ordered
def add_products(h: Floats, matrix: Floats, first: int, stride: int, y: Floats) -> None:
    """y[v] += sum over d of h[d] matrix[first + d stride + v]."""
    width, n = y.shape[0], h.shape[0]
    d = 0
    while d + 4 <= n:
        at = first + d * stride
        h0, h1, h2, h3 = h[d], h[d + 1], h[d + 2], h[d + 3]
        w0, w1 = matrix[at : at + width], matrix[at + stride : at + stride + width]
        at += 2 * stride
        w2, w3 = matrix[at : at + width], matrix[at + stride : at + stride + width]
        for v in range(width):
            y[v] = (((y[v] + h0 * w0[v]) + h1 * w1[v]) + h2 * w2[v]) + h3 * w3[v]
        d += 4
    while d < n:
        at = first + d * stride
        h0, w0 = h[d], matrix[at : at + width]
        for v in range(width):
            y[v] = y[v] + h0 * w0[v]
        d += 1


@ordered
def add_products_of_two(
    g: Floats, h: Floats, matrix: Floats, first: int, stride: int, x: Floats, y: Floats
) -> None:
    """`add_products` of g into x and of h into y: the matrix is read once."""
    width, n = y.shape[0], h.shape[0]
    d = 0
    while d + 4 <= n:
        at = first + d * stride
        g0, g1, g2, g3 = g[d], g[d + 1], g[d + 2], g[d + 3]
        h0, h1, h2, h3 = h[d], h[d + 1], h[d + 2], h[d + 3]
        w0, w1 = matrix[at : at + width], matrix[at + stride : at + stride + width]
        at += 2 * stride
        w2, w3 = matrix[at : at + width], matrix[at + stride : at + stride + width]
        for v in range(width):
            x[v] = (((x[v] + g0 * w0[v]) + g1 * w1[v]) + g2 * w2[v]) + g3 * w3[v]
            y[v] = (((y[v] + h0 * w0[v]) + h1 * w1[v]) + h2 * w2[v]) + h3 * w3[v]
        d += 4
    while d < n:
        at = first + d * stride
        g0, h0, w0 = g[d], h[d], matrix[at : at + width]
        for v in range(width):
            x[v] = x[v] + g0 * w0[v]
            y[v] = y[v] + h0 * w0[v]
        d += 1


@ordered
def score_one(h: Floats, matrix: Floats, first: int, size: int, scores: Floats) -> None:
    """Products of one row with a matrix, added to scores [V]."""
    for begin in range(0, size, ONE_ROW_TILE):
        end = min(begin + ONE_ROW_TILE, size)
        add_products(h, matrix, first + begin, size, scores[begin:end])


@ordered
def score_many(
    hidden: Floats, rows: Integers, matrix: Floats, first: int, size: int, scores: Floats
) -> None:
    """Products of several rows with one matrix, added to scores [T,V]."""
    n = rows.shape[0]
    for begin in range(0, size, TILE):
        end = min(begin + TILE, size)
        t = 0
        while t + 2 <= n:
            add_products_of_two(
                hidden[rows[t]],
                hidden[rows[t + 1]],
                matrix,
                first + begin,
                size,
                scores[t, begin:end],
                scores[t + 1, begin:end],
            )
            t += 2
        if t < n:
            add_products(hidden[rows[t]], matrix, first + begin, size, scores[t, begin:end])


@ordered
def scale(x: Floats, by: float) -> None:
    for v in range(x.shape[0]):
        x[v] = x[v] * by


# --- sums of exponentials ----------------------------------------------------------------------


@ordered
def exponentials(x: Floats, shift: float, fractions: Floats, powers: NDArray[np.int32]) -> None:
    """e^(x - shift), x no larger than shift, as fractions times the float32 whose bits are powers.

    e^t = 2^n e^r with |r| < 0.35, where seven terms of the series are enough.
    """
    for v in range(x.shape[0]):
        t = max(x[v] - shift, LOWEST)
        n = (t * LOG2_E + ROUNDER) - ROUNDER
        r = (t - n * LN2_HIGH) - n * LN2_LOW
        fractions[v] = ONE + r * (ONE + r * (C2 + r * (C3 + r * (C4 + r * (C5 + r * C6)))))
        powers[v] = (np.int32(n) + np.int32(127)) << np.int32(23)


@reordered
def dot(a: Floats, b: Floats) -> np.float32:
    total = ZERO
    for v in range(a.shape[0]):
        total += a[v] * b[v]
    return total


@ordered
def sum_of_exponentials(
    x: Floats, shift: float, fractions: Floats, powers: NDArray[np.int32]
) -> np.float32:
    n = x.shape[0]
    exponentials(x, shift, fractions[:n], powers[:n])
    return dot(fractions[:n], powers[:n].view(np.float32))


# --- the best ----------------------------------------------------------------------------------


@ordered
def best_of(x: Floats, k: int, values: Floats, places: Integers) -> None:
    """The k largest of x and where they are, best first, the earlier one first among equals."""
    if k > INSERTED:
        order = np.argsort(-x, kind="mergesort")
        for i in range(k):
            places[i] = order[i]
            values[i] = x[order[i]]
        return
    count = 0
    for v in range(x.shape[0]):
        score = x[v]
        if count < k:
            at = count
            count += 1
        elif score > values[k - 1]:
            at = k - 1
        else:
            continue
        while at > 0 and values[at - 1] < score:
            values[at] = values[at - 1]
            places[at] = places[at - 1]
            at -= 1
        values[at] = score
        places[at] = v


@compiled(ORDERED, types.void(ROWS, FLOATS, FLOATS, COUNT, INTEGER_TABLE, FLOAT_TABLE))
def rank_experts(
    hidden: Floats, gate: Floats, gate_bias: Floats, ranks: int, ranked: Integers, gates: Floats
) -> None:
    """Each row's best experts and their share of the softmax: [B,ranks] each."""
    n_experts = gate_bias.shape[0]
    logits = np.empty(n_experts, np.float32)
    fractions, powers = np.empty(n_experts, np.float32), np.empty(n_experts, np.int32)
    for b in range(hidden.shape[0]):
        logits[:] = gate_bias
        add_products(hidden[b], gate, 0, n_experts, logits)
        # By logit: shares far behind the best underflow to equal zeros.
        best_of(logits, ranks, gates[b], ranked[b])
        top = gates[b, 0]
        total = sum_of_exponentials(logits, top, fractions, powers)
        for rank in range(ranks):
            gates[b, rank] = np.exp(gates[b, rank] - top) / total


@ordered
def answer_task(
    scores: Floats,
    temperature: float,
    distrust: float,
    absent: int,
    classes: NDArray[np.int32],
    k: int,
    best_classes: Integers,
    log_probs: Floats,
    places: Integers,
    fractions: Floats,
    powers: NDArray[np.int32],
) -> None:
    """From products with an expert's rows [V] to its k best classes and their log-probabilities.

    Each of the `absent` classes has score 0, so it adds 1 to the normaliser.
    """
    scale(scores, temperature)
    best_of(scores, k, log_probs, places)
    top = log_probs[0]
    if absent > 0:
        top = max(top, ZERO)
    total = sum_of_exponentials(scores, top, fractions, powers)
    if absent > 0:
        total += np.float32(absent) * np.exp(-top)
    normaliser = top + np.log(total)
    for i in range(k):
        log_probs[i] = (log_probs[i] - normaliser) + distrust
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


@ordered
def rows_at_once(size: int) -> int:
    return max(1, SCORES_AT_ONCE // size)


@ordered
def group_tasks(experts: Integers, n_experts: int, counts: Integers) -> tuple[Integers, Integers]:
    """Tasks in the order of their experts [T], and where those of each begin [K+1]."""
    counts[:] = 0
    for t in range(experts.shape[0]):
        counts[experts[t]] += 1
    starts = np.zeros(n_experts + 1, np.int64)
    for e in range(n_experts):
        starts[e + 1] = starts[e] + counts[e]
    order, filled = np.empty(experts.shape[0], np.int64), starts.copy()
    for t in range(experts.shape[0]):
        order[filled[experts[t]]] = t
        filled[experts[t]] += 1
    return order, starts


@ordered
def largest_needs(offsets: Integers, counts: Integers) -> tuple[int, int, int]:
    """Of all experts in use: the most classes, the most tasks at once, the most scores at once."""
    widest, most, largest = 1, 1, 1
    for e in range(counts.shape[0]):
        size = offsets[e + 1] - offsets[e]
        if counts[e] > 0 and size > 0:
            together = min(counts[e], rows_at_once(size))
            widest, most = max(widest, size), max(most, together)
            largest = max(largest, together * size)
    return widest, most, largest


@compiled(
    ORDERED,
    types.void(
        ROWS,
        INTEGERS,
        INTEGERS,
        FLOATS,
        FLOATS,
        FLOATS,
        FLOATS,
        INTEGERS,
        CLASSES,
        COUNT,
        COUNT,
        INTEGER_TABLE,
        FLOAT_TABLE,
        SECONDS,
        types.int64[::1],
    ),
)
def search(
    hidden: Floats,  # [B,D]
    rows: Integers,  # [T] of which row
    experts: Integers,  # [T] in which expert
    temperatures: Floats,  # [T]
    distrust: Floats,  # [T]
    weights: Floats,  # [R D] one matrix [D,V] after the other
    biases: Floats,  # [R], or empty
    offsets: Integers,  # [K+1] in R
    classes: NDArray[np.int32],  # [R]
    n_classes: int,
    k: int,
    best_classes: Integers,  # [T,k] to fill in
    log_probs: Floats,  # [T,k] to fill in
    seconds: NDArray[np.float64],  # [K] to fill in: how long each expert took
    counts: Integers,  # [K] to fill in: for how many tasks
) -> None:
    """Search every task's expert for its row. Tasks of one expert are done together."""
    n_experts, hidden_size = offsets.shape[0] - 1, hidden.shape[1]
    order, starts = group_tasks(experts, n_experts, counts)
    widest, most, largest = largest_needs(offsets, counts)
    buffer = np.empty(largest, np.float32)
    fractions, powers = np.empty(widest, np.float32), np.empty(widest, np.int32)
    places = np.empty(k, np.int64)
    task_rows = np.empty(most, np.int64)
    clock = np.empty(2, np.int64)
    for e in range(n_experts):
        first, size = offsets[e], offsets[e + 1] - offsets[e]
        if counts[e] == 0 or size == 0:
            continue
        started = nanoseconds(clock)
        begin, end = starts[e], starts[e + 1]
        while begin < end:
            n = min(end - begin, rows_at_once(size))
            scores = buffer[: n * size].reshape((n, size))
            for i in range(n):
                task_rows[i] = rows[order[begin + i]]
                scores[i] = ZERO
                if biases.shape[0] > 0:
                    scores[i] = biases[first : first + size]
            if n == 1:
                score_one(hidden[task_rows[0]], weights, first * hidden_size, size, scores[0])
            else:
                score_many(hidden, task_rows[:n], weights, first * hidden_size, size, scores)
            for i in range(n):
                t = order[begin + i]
                answer_task(
                    scores[i],
                    temperatures[t],
                    distrust[t],
                    n_classes - size,
                    classes[first : first + size],
                    min(k, size),
                    best_classes[t],
                    log_probs[t],
                    places,
                    fractions,
                    powers,
                )
            begin += n
        seconds[e] = (nanoseconds(clock) - started) * 1e-9


@compiled(
    ORDERED,
    types.int64(
        ROWS,
        FLOATS,
        FLOATS,
        FLOATS,
        FLOATS,
        INTEGERS,
        CLASSES,
        COUNT,
        COUNT,
        INTEGER_TABLE,
        FLOAT_TABLE,
        types.int64[::1],
        types.float32[::1],
        SECONDS,
        types.int64[::1],
    ),
)
def answer_first(
    hidden: Floats,
    gate: Floats,
    gate_bias: Floats,
    weights: Floats,
    biases: Floats,
    offsets: Integers,
    classes: NDArray[np.int32],
    n_classes: int,
    k: int,
    best_classes: Integers,
    log_probs: Floats,
    experts: Integers,  # [B] to fill in
    gates: Floats,  # [B] to fill in
    seconds: NDArray[np.float64],
    counts: Integers,
) -> int:
    """`rank_experts` and `search` of each row's best expert. Returns the gate's nanoseconds."""
    clock = np.empty(2, np.int64)
    started = nanoseconds(clock)
    n = hidden.shape[0]
    rank_experts(hidden, gate, gate_bias, 1, experts.reshape((n, 1)), gates.reshape((n, 1)))
    gate_time = nanoseconds(clock) - started
    search(
        hidden,
        np.arange(n),
        experts,
        gates,
        np.zeros(n, np.float32),
        weights,
        biases,
        offsets,
        classes,
        n_classes,
        k,
        best_classes,
        log_probs,
        seconds,
        counts,
    )
    return gate_time
