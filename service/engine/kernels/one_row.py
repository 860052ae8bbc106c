"""One row's answer from its best expert: what is asked most often, and takes a few microseconds.

Nothing is done here that `fidelity.answer` does not do, and answers are the same, bit for bit; but
it takes fewer arrays, and fills in fewer, than a batch in any mode needs.
"""

import numpy as np
from numba import types

from service.engine.kernels.answers import answers_words, fill_in_log_probs, make_answers
from service.engine.kernels.borrowed import LINE, array_at, stack_words, words
from service.engine.kernels.certified import make_scan, scan_words
from service.engine.kernels.class_lists import PACKED, ClassLists, unpack
from service.engine.kernels.clock import nanoseconds
from service.engine.kernels.fidelity import (
    classes_of,
    search_expert,
)
from service.engine.kernels.gate import rank_row
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
    ordered,
)
from service.engine.kernels.products.bounded_products import Doubles, in_steps, words_for_rows
from service.engine.kernels.products.float_products import fetch
from service.engine.kernels.products.intrinsics import prefetch
from service.engine.kernels.scores import finite

UNSUITABLE = -1  # `fidelity.answer` is to be called instead
EXPERT_BITS = 40  # what is returned is expert * 2^40 + nanoseconds
FIXED = 4  # words that are always needed
STACK = 8192  # words; more are not put on a stack
FETCHED = 48  # int8 rows that are asked for while the query row is brought into steps
FLOAT = 4  # bytes


@ordered
def fetch_first(lists: ClassLists, e: int, width: int) -> None:
    """Asks for what the search of an expert begins with."""
    begin, end = lists.offsets[e], lists.offsets[e + 1]
    fetch(lists.rest, e * (width + 1), width + 1)
    for i in range(begin, min(begin + FETCHED, end)):
        first = np.int64(lists.classes[i]) * width
        for place in range(first, first + width, LINE):
            prefetch(lists.quantised, place)


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
    lists = unpack(array_at(packed, PACKED, np.int64))
    width, n_experts, k = row.shape[1], lists.gate_bias.shape[0], best_classes.shape[1]
    address = row.ctypes.data
    if row.strides[1] != FLOAT or address % FLOAT != 0:
        return UNSUITABLE
    hidden = array_at(address, width, np.float32).reshape((1, width))
    size = classes_of(lists, n_experts)
    after = FIXED + (n_experts + 1) // 2
    scanned = after + answers_words(1, k) + words_for_rows(1, width)
    if scanned + scan_words(1, k, size) > STACK or not finite(hidden):
        return UNSUITABLE
    space = array_at(stack_words(STACK), STACK, np.float64)
    clock, group, ranked = words(space, 0, 2), words(space, 2, 1), words(space, 3, 1)
    logits = space[FIXED:after].view(np.float32)[:n_experts]
    started = nanoseconds(clock)
    rank_row(hidden[0], lists.gate, lists.gate_bias, logits, ranked, gates)
    chosen = nanoseconds(clock)
    e, group[0] = ranked[0], 0
    held = classes_of(lists, e)
    if held < k or held >= size or n_experts == 1:
        return UNSUITABLE
    fetch_first(lists, e, width)
    answers = make_answers(space[after:], best_classes)
    rows = in_steps(lists, hidden, space[after + answers_words(1, k) :])
    scan = make_scan(space[scanned:], 1, k, size)
    search_expert(lists, e, hidden, rows, group, answers, scan)
    fill_in_log_probs(answers, 0, log_probs)
    seconds[:] = 0
    seconds[e] = (nanoseconds(clock) - chosen) * 1e-9
    return int((e << EXPERT_BITS) + chosen - started)


call = entry_point(answer_one)
