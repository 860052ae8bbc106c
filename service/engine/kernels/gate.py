"""The gate in compiled loops: which experts to search for a row.

B rows, D hidden, K experts, g experts searched for a row.
"""

import numpy as np
from numba import types

from service.engine.kernels.borrowed import borrowed
from service.engine.kernels.clock import nanoseconds
from service.engine.kernels.jit import (
    COUNTS,
    FLOATS,
    ORDERED,
    ROWS,
    Floats,
    Integers,
    allocating,
    compiled,
    ordered,
)
from service.engine.kernels.products.float_products import score_many, score_one_in_cache
from service.engine.kernels.scores import best_shares, finite

RANKED_AT_ONCE = 64  # rows whose gate logits stay in the first caches

NOT_FINITE = -1
ZERO = np.float32(0)
SMALLEST_GATE = np.finfo(np.float32).tiny


@ordered
def rank_row(
    h: Floats,  # [D]
    gate: Floats,  # [D K] by column
    gate_bias: Floats,  # [K]
    logits: Floats,  # [K] scratch
    ranked: Integers,  # [g] to fill in
    gates: Floats,  # [g] to fill in
) -> None:
    """A row's best experts and their share of the softmax."""
    for e in range(gate_bias.shape[0]):
        logits[e] = gate_bias[e]
    score_one_in_cache(h, gate, gate_bias.shape[0], logits)
    best_shares(logits, ranked, gates)


@allocating
def rank(
    hidden: Floats,  # [B,D]
    gate: Floats,  # [D K] by column
    gate_bias: Floats,  # [K]
    ranked: Integers,  # [B g] to fill in
    gates: Floats,  # [B g] to fill in
) -> int:
    """Each row's best experts and their share of the softmax. Returns the nanoseconds it took."""
    n_experts, n = gate_bias.shape[0], hidden.shape[0]
    g = ranked.shape[0] // n
    together = min(n, RANKED_AT_ONCE)
    space = np.empty(2 + (together * n_experts + 1) // 2, np.int64)
    clock = borrowed(space[:2])
    started = nanoseconds(clock)
    numbers = borrowed(space[2:]).view(np.float32)
    logits = numbers[: together * n_experts].reshape((together, n_experts))
    for first in range(0, n, together):
        count = min(together, n - first)
        for i in range(count):
            logits[i] = gate_bias
        if count == 1:
            of_row = slice(first * g, (first + 1) * g)
            rank_row(hidden[first], gate, gate_bias, logits[0], ranked[of_row], gates[of_row])
            continue
        score_many(hidden, np.arange(first, first + count), gate, 0, n_experts, logits)
        for i in range(count):
            of_row = slice((first + i) * g, (first + i + 1) * g)
            best_shares(logits[i], ranked[of_row], gates[of_row])
    passed = nanoseconds(clock) - started
    space[0] = 0  # until here it is borrowed from
    return passed


@compiled(ORDERED, types.int64(ROWS, FLOATS, FLOATS, COUNTS, types.float32[::1]), allocates=True)
def rank_experts(
    hidden: Floats, gate: Floats, gate_bias: Floats, ranked: Integers, gates: Floats
) -> int:
    """`rank`, called from Python; NOT_FINITE if a row is not finite."""
    if not finite(hidden):
        return NOT_FINITE
    return rank(hidden, gate, gate_bias, ranked, gates)


@ordered
def log_gate_ratio(gates: Floats, place: int) -> np.float32:
    """The log of a row's gate value at `place` relative to its best one."""
    if place == 0:
        return ZERO
    return np.float32(np.log(max(gates[place], SMALLEST_GATE) / gates[0]))
