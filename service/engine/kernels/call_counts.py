"""Adds an engine call to its model's counters, in one compiled function.

A model's block of counters holds four totals, the time of the last call, three histograms, how many
rows had a gate value in each of a few bins and, for each expert, the rows it scored, the rows whose
first choice it was, and a histogram. A histogram is a sum followed by one count for each bucket,
not yet cumulative.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

# Here and not beside the metrics that show them, because machine code is cached until a file of
# this folder changes.
SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0
)  # fmt: skip
# An expert takes tens of microseconds, and there is one histogram for each: fewer, lower buckets.
EXPERT_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.005, 0.025, 0.1)

HISTOGRAM = 1 + len(SECONDS) + 1  # a sum, the buckets and the one above all
REQUESTS, ROWS, EXECUTIONS = 0, 1, 2
REQUEST_SECONDS = 3  # of engine calls, as requests saw them: a call that two share counts twice
LAST = 4  # seconds since the epoch: not a total, so the latest worker's counts
QUEUE = 5
COMPUTE = QUEUE + HISTOGRAM
GATE = COMPUTE + HISTOGRAM
GATE_BINS = 10
CONFIDENCE = GATE + HISTOGRAM
EXPERTS = CONFIDENCE + GATE_BINS
SCORED, CHOSEN, TOOK = 0, 1, 2  # of an expert; the last is its histogram
EXPERT = TOOK + 1 + len(EXPERT_SECONDS) + 1

AddCall = Callable[
    [
        NDArray[np.float64],
        NDArray[np.float64],
        int,
        int,
        float,
        float,
        float,
        NDArray[np.int64],
        NDArray[np.float64],
        NDArray[np.int64],
        NDArray[np.float32],
        NDArray[np.float32],
    ],
    None,
]


def size(n_experts: int) -> int:
    return EXPERTS + EXPERT * n_experts


@cache
def compiled_add_call() -> AddCall:
    """`add_call` as machine code; call it while models are loaded, never in a request."""
    from numba import types

    from service.engine.kernels.jit import ORDERED, compiled, given

    counters, count, seconds = types.float64[::1], types.int64, types.float64
    signature = types.void(
        counters,
        counters,
        count,
        count,
        seconds,
        seconds,
        seconds,
        given(types.int64, 1),
        given(types.float64, 1),
        given(types.int64, 1, "A"),
        given(types.float32, 1, "A"),
        given(types.float32, 1),
    )
    return compiled(ORDERED, signature)(add_call)


def add_call(
    counters: NDArray[np.float64],  # a model's block
    waits: NDArray[np.float64],  # of which the first `requests` count
    requests: int,
    rows: int,
    now: float,  # since the epoch
    seconds: float,
    gate_seconds: float,
    expert_rows: NDArray[np.int64],  # [K]
    expert_seconds: NDArray[np.float64],  # [K]
    chosen: NDArray[np.int64],  # [B] the gate's first choice
    gates: NDArray[np.float32],  # [B] its value
    edges: NDArray[np.float32],  # [GATE_BINS-1] ascending: the upper ends of all bins but the last
) -> None:
    """Adds one engine call and the requests that it answered."""

    def observe(at: int, value: float) -> None:
        bucket = 0
        while bucket < len(SECONDS) and value > SECONDS[bucket]:
            bucket += 1
        counters[at] += value
        counters[at + 1 + bucket] += 1

    counters[REQUESTS] += requests
    counters[ROWS] += rows
    counters[EXECUTIONS] += 1
    counters[REQUEST_SECONDS] += requests * seconds
    counters[LAST] = now
    for i in range(requests):
        observe(QUEUE, waits[i])
    observe(COMPUTE, seconds)
    observe(GATE, gate_seconds)
    n_experts = min(expert_rows.shape[0], (counters.shape[0] - EXPERTS) // EXPERT)
    for i in range(chosen.shape[0]):
        b = 0
        while b < edges.shape[0] and gates[i] > edges[b]:
            b += 1
        counters[CONFIDENCE + b] += 1
        if chosen[i] < n_experts:
            counters[EXPERTS + chosen[i] * EXPERT + CHOSEN] += 1
    for e in range(n_experts):
        if expert_rows[e] > 0:
            at = EXPERTS + e * EXPERT
            bucket = 0
            while bucket < len(EXPERT_SECONDS) and expert_seconds[e] > EXPERT_SECONDS[bucket]:
                bucket += 1
            counters[at + SCORED] += expert_rows[e]
            counters[at + TOOK] += expert_seconds[e]
            counters[at + TOOK + 1 + bucket] += 1
