"""The search of experts in compiled loops: from rows to their k best classes.

B rows, D hidden, K experts, V classes of an expert, k answers, g experts searched for a row,
T tasks: a row and an expert to search for it.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from service.engine.kernels.clock import nanoseconds
from service.engine.kernels.gate import NOT_FINITE, log_gate_ratio, rank
from service.engine.kernels.jit import (
    COUNTS,
    FLOAT_TABLE,
    INTEGER_TABLE,
    INTEGERS,
    ORDERED,
    ROWS,
    SECONDS,
    Floats,
    Integers,
    allocating,
    compiled,
    inlined,
    ordered,
)
from service.engine.kernels.layer import Layer, unpack
from service.engine.kernels.merge import MINUS_INFINITY, marks, merge, merge_all
from service.engine.kernels.products.float_products import score_many, score_one
from service.engine.kernels.products.int8_products import score_int8
from service.engine.kernels.scores import (
    best_of,
    best_rescored,
    finite,
    normalise,
    rescored,
    scale,
)
from service.topk import NO_CLASS

SCORES_AT_ONCE = 2**20
SORTED_BY_INSERTION = 32  # up to so many tasks

ZERO = np.float32(0)


class Tasks(NamedTuple):
    rows: Integers  # [T] of which row
    experts: Integers  # [T] in which expert
    temperatures: Floats  # [T] what a row's products are multiplied by
    log_ratios: Floats  # [T] what is added to its log-probabilities


class Found(NamedTuple):
    classes: Integers  # [T,k]
    log_probs: Floats  # [T,k]


class Work(NamedTuple):
    seconds: NDArray[np.float64]  # [K] how long each expert took
    rows: Integers  # [K] for how many rows


class Scratch(NamedTuple):
    scores: Floats
    rows: Integers
    places: Integers  # [k]
    candidates: Integers  # [c] of an int8 expert, to be scored exactly
    exact: Floats  # [c]


# --- tasks of one expert together --------------------------------------------------------------


@allocating
def group_tasks(experts: Integers, n_experts: int, order: Integers) -> None:
    """Fills in the tasks in the order of their experts [T]."""
    n = experts.shape[0]
    if n <= SORTED_BY_INSERTION:
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
def rows_at_once(size: int) -> int:
    return max(1, SCORES_AT_ONCE // size)


@inlined
def make_scratch(layer: Layer, experts: Integers, order: Integers, k: int) -> Scratch:
    """As large as the largest group of tasks needs it."""
    widest, most, largest = 1, 1, 1  # classes, tasks at once, scores at once
    begin = 0
    while begin < order.shape[0]:
        end, e = end_of_group(experts, order, begin), experts[order[begin]]
        size = max(layer.offsets[e + 1] - layer.offsets[e], 1)
        together = min(end - begin, rows_at_once(size))
        widest, most = max(widest, size), max(most, together)
        largest = max(largest, together * size)
        begin = end
    c = rescored(k, widest) if layer.quantised.shape[0] > 0 else 0
    # Allocations are a good part of a small call, so there are two.
    floats, integers = np.empty(largest + c, np.float32), np.empty(k + most + c, np.int64)
    return Scratch(
        scores=floats[:largest],
        rows=integers[k : k + most],
        places=integers[:k],
        candidates=integers[k + most :],
        exact=floats[largest:],
    )


# --- searching ---------------------------------------------------------------------------------


@allocating
def search(
    layer: Layer,
    hidden: Floats,  # [B,D]
    tasks: Tasks,
    found: Found,  # to fill in
    work: Work,  # to add to
) -> None:
    """Searches every task's expert for its row. Tasks of one expert are done together."""
    n_tasks, k = tasks.experts.shape[0], found.classes.shape[1]
    integers = np.empty(n_tasks + 2, np.int64)
    order, clock = integers[:n_tasks], integers[n_tasks:]
    group_tasks(tasks.experts, layer.offsets.shape[0] - 1, order)
    scratch = make_scratch(layer, tasks.experts, order, k)
    end = 0
    while end < n_tasks:
        begin, end = end, end_of_group(tasks.experts, order, end)
        group, e = order[begin:end], tasks.experts[order[begin]]
        size = layer.offsets[e + 1] - layer.offsets[e]
        if size < k:
            for t in group:
                found.classes[t, size:], found.log_probs[t, size:] = NO_CLASS, MINUS_INFINITY
        if size == 0:
            continue
        started = nanoseconds(clock)
        together = rows_at_once(size)
        for first in range(0, group.shape[0], together):
            search_expert(layer, hidden, tasks, e, group[first : first + together], found, scratch)
        work.seconds[e] += (nanoseconds(clock) - started) * 1e-9
        work.rows[e] += group.shape[0]


@inlined
def search_expert(
    layer: Layer,
    hidden: Floats,  # [B,D]
    tasks: Tasks,
    e: int,
    group: Integers,  # the tasks of expert e that are scored together
    found: Found,  # to fill in
    scratch: Scratch,
) -> None:
    first, n = layer.offsets[e], group.shape[0]
    size = layer.offsets[e + 1] - first
    rows, scores = scratch.rows[:n], scratch.scores[: n * size].reshape((n, size))
    for i in range(n):
        rows[i] = tasks.rows[group[i]]
    score(layer, hidden, rows, first, size, scores)
    k = min(found.classes.shape[1], size)
    for i in range(n):
        t = group[i]
        log_probs = found.log_probs[t]
        scale(scores[i], tasks.temperatures[t])
        if layer.quantised.shape[0] > 0:
            top = best_rescored(
                layer.weights,
                layer.biases,
                first,
                hidden[rows[i]],
                tasks.temperatures[t],
                scores[i],
                k,
                log_probs,
                scratch.places,
                scratch.candidates,
                scratch.exact,
            )
        else:
            best_of(scores[i], k, log_probs, scratch.places)
            top = log_probs[0]
        normalise(
            scores[i],
            top,
            tasks.log_ratios[t],
            layer.n_classes - size,
            layer.classes[first : first + size],
            k,
            found.classes[t],
            log_probs,
            scratch.places,
        )


@inlined
def score(
    layer: Layer,
    hidden: Floats,  # [B,D]
    rows: Integers,  # [n]
    first: int,  # where the expert's classes begin
    size: int,  # V
    scores: Floats,  # [n,V] to fill in
) -> None:
    """Logits of rows in one expert: exact, or about, by int8."""
    for i in range(rows.shape[0]):
        if layer.biases.shape[0] > 0:
            scores[i] = layer.biases[first : first + size]
        else:
            scores[i] = ZERO
    if layer.quantised.shape[0] > 0:
        score_int8(hidden, rows, layer.quantised, layer.scales, first, size, scores)
    elif rows.shape[0] == 1:
        score_one(hidden[rows[0]], layer.weights, first * hidden.shape[1], size, scores[0])
    else:
        score_many(hidden, rows, layer.weights, first * hidden.shape[1], size, scores)


@allocating
def fill_up(
    layer: Layer,
    hidden: Floats,  # [B,D]
    b: int,  # the row
    searched: int,  # how many experts were searched for it
    best: Found,  # [B,k] to fill up
    needed: int,
    work: Work,  # to add to
) -> None:
    """Searches a row's next-best experts until it has the classes that are needed."""
    k, n_experts = best.classes.shape[1], layer.gate_bias.shape[0]
    ranked, gates = np.empty(n_experts, np.int64), np.empty(n_experts, np.float32)
    rank(hidden[b : b + 1], layer.gate, layer.gate_bias, ranked, gates)
    cursors, taken = np.empty(2, np.int64), marks(k, layer.n_classes)
    row, log_ratio = np.array([b]), np.empty(1, np.float32)
    both = Found(np.empty((2, k), np.int64), np.empty((2, k), np.float32))
    for place in range(searched, n_experts):
        if best.classes[b, needed - 1] != NO_CLASS:
            return
        log_ratio[0] = log_gate_ratio(gates, place)
        task = Tasks(row, ranked[place : place + 1], gates[:1], log_ratio)
        search(layer, hidden, task, Found(both.classes[1:], both.log_probs[1:]), work)
        both.classes[0], both.log_probs[0] = best.classes[b], best.log_probs[b]
        merge(both.classes, both.log_probs, best.classes[b], best.log_probs[b], cursors, taken)


@inlined
def answer(
    layer: Layer,
    hidden: Floats,  # [B,D]
    is_ranked: bool,
    ranked: Integers,  # [B g] the experts to search, to fill in unless they are known
    gates: Floats,  # [B g] likewise
    best: Found,  # [B,k] to fill in
    needed: int,  # of the k
    work: Work,  # to fill in
) -> int:
    """The k best classes of each row in its experts. Returns the gate's nanoseconds.

    The best gate value is the row's inverse temperature in whichever expert is searched. A row
    whose experts hold fewer classes than are needed goes on to its next-best ones. Where a row is
    not finite, nothing is computed and NOT_FINITE returned.
    """
    gate_time = 0
    if not is_ranked:
        if not finite(hidden):
            return NOT_FINITE
        gate_time = rank(hidden, layer.gate, layer.gate_bias, ranked, gates)
    work.seconds[:], work.rows[:] = 0, 0
    n, k = best.classes.shape
    g = ranked.shape[0] // n
    rows, floats = np.empty(n * g, np.int64), np.empty((2, n * g), np.float32)
    tasks = Tasks(rows, ranked, floats[0], floats[1])
    for b in range(n):
        for place in range(g):
            t = b * g + place
            tasks.rows[t], tasks.temperatures[t] = b, gates[b * g]
            tasks.log_ratios[t] = log_gate_ratio(gates[b * g : (b + 1) * g], place)
    found = best
    if g > 1:
        found = Found(np.empty((n * g, k), np.int64), np.empty((n * g, k), np.float32))
    search(layer, hidden, tasks, found, work)
    if g > 1:
        merge_all(found.classes, found.log_probs, layer.n_classes, best.classes, best.log_probs)
    if g == layer.gate_bias.shape[0]:
        return gate_time
    for b in range(n):
        if best.classes[b, needed - 1] == NO_CLASS:
            fill_up(layer, hidden, b, g, best, needed, work)
    return gate_time


# --- what is called from Python ----------------------------------------------------------------


ANSWER = types.int64(
    INTEGERS, ROWS, types.boolean, COUNTS, types.float32[::1], INTEGER_TABLE, FLOAT_TABLE,
    types.int64, SECONDS, COUNTS,
)  # fmt: skip


@cache
def answer_from(stored: type[np.generic]) -> Callable[..., int]:
    """`answer` of packed layers with weights of float32, or of float16 by their bits (uint16)."""

    @compiled(ORDERED, ANSWER, allocates=True)
    def from_stored(
        packed: Integers,
        hidden: Floats,
        is_ranked: bool,
        ranked: Integers,
        gates: Floats,
        best_classes: Integers,
        log_probs: Floats,
        needed: int,
        seconds: NDArray[np.float64],
        worked: Integers,
    ) -> int:
        layer = unpack(packed, stored)
        best, work = Found(best_classes, log_probs), Work(seconds, worked)
        return answer(layer, hidden, is_ranked, ranked, gates, best, needed, work)

    return from_stored


answer_from(np.float32)  # float16 is rare, so it is compiled when a model needs it
