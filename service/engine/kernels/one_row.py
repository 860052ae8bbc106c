"""One row's answer from its best expert: what is asked most often, and takes a few microseconds.

Nothing is done here that `fidelity.answer` does not do, and answers are the same, bit for bit; but
it takes fewer arrays, and fills in fewer, than a batch in any mode needs.
"""

import numpy as np
from numba import types
from numba.np.numpy_support import carray

from service.engine.kernels.bounded_products import in_steps, words_for_rows
from service.engine.kernels.borrowed import borrowed, words
from service.engine.kernels.certified import make_scan, scan_words
from service.engine.kernels.class_lists import PACKED, unpack
from service.engine.kernels.clock import nanoseconds
from service.engine.kernels.fidelity import (
    answers_words,
    classes_of,
    fill_in_log_probs,
    make_answers,
    search_expert,
)
from service.engine.kernels.gate import rank_row
from service.engine.kernels.intrinsics import pointer
from service.engine.kernels.jit import (
    FLOAT_TABLE,
    INTEGER_TABLE,
    ORDERED,
    SECONDS,
    Floats,
    Integers,
    compiled,
    entry_point,
    given,
)
from service.engine.kernels.bounded_products import Doubles
from service.engine.kernels.scores import finite

UNSUITABLE = -1  # `fidelity.answer` is to be called instead
EXPERT_BITS = 40  # an answer is expert * 2^40 + nanoseconds
BYTES = 4


@compiled(
    ORDERED,
    types.int64(
        types.int64, given(types.float32, 2, "A"), INTEGER_TABLE, FLOAT_TABLE, types.float32[::1],
        SECONDS,
    ),
)  # fmt: skip
def answer_one(
    packed: int,  # address of the record that `class_lists.pack` made
    row: Floats,  # [1,D] of any layout
    best_classes: Integers,  # [1,k] to fill in
    log_probs: Floats,  # [1,k] to fill in
    gates: Floats,  # [1] to fill in
    seconds: Doubles,  # [K] to fill in
) -> int:
    """Returns which expert was searched and the gate's nanoseconds, or UNSUITABLE: for a row that
    is not finite or not contiguous, or whose expert holds fewer than k classes."""
    lists = unpack(carray(pointer(packed), PACKED, np.int64))
    width, n_experts, k = row.shape[1], lists.gate_bias.shape[0], best_classes.shape[1]
    if row.strides[1] != BYTES or row.ctypes.data % BYTES != 0:
        return UNSUITABLE
    hidden = carray(pointer(row.ctypes.data), (1, width), np.float32)
    if not finite(hidden):
        return UNSUITABLE
    size = classes_of(lists, n_experts)
    after = answers_words(1, k)
    scanned = after + words_for_rows(1, width)
    ranking = scanned + scan_words(1, k, size)
    owned = np.empty(ranking + 4 + (n_experts + 1) // 2, np.float64)
    space = borrowed(owned)
    clock, group = words(space, ranking, 2), words(space, ranking + 2, 1)
    ranked = words(space, ranking + 3, 1)
    logits = space[ranking + 4 :].view(np.float32)[:n_experts]
    started = nanoseconds(clock)
    rank_row(hidden[0], lists.gate, lists.gate_bias, logits, ranked, borrowed(gates))
    chosen = nanoseconds(clock)
    e, group[0] = ranked[0], 0
    held = classes_of(lists, e)
    if held < k or held >= size or n_experts == 1:
        return UNSUITABLE
    answers = make_answers(space, borrowed(best_classes))
    rows = in_steps(lists, hidden, space[after:])
    scan = make_scan(space[scanned:], 1, k, size)
    search_expert(lists, e, hidden, rows, group, answers, scan)
    fill_in_log_probs(answers, 0, borrowed(log_probs))
    seconds[:] = 0
    seconds[e] = (nanoseconds(clock) - chosen) * 1e-9
    owned[0] = 0  # until here it is borrowed from
    return (e << EXPERT_BITS) + chosen - started


call = entry_point(answer_one)
