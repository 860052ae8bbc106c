"""Answers from the head's own rows, in compiled loops: some experts', all classes', or first the
one and, where a promise of recall needs it, then the other.

B rows, D hidden, K experts, N classes, k answers, g experts searched for a row, m experts ranked,
F features.
"""

import numpy as np
from numba import types
from numpy.typing import NDArray

from service.bundle.contract import FEATURES
from service.engine.kernels.answers import Answers, fill_in_log_probs, make_answers
from service.engine.kernels.borrowed import borrowed, words
from service.engine.kernels.certified import Scan, make_scan, scan_words, search_list
from service.engine.kernels.class_lists import ClassLists, unpack
from service.engine.kernels.clock import nanoseconds
from service.engine.kernels.gate import NOT_FINITE, SMALLEST_GATE, rank
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
    forced,
    given,
    ordered,
)
from service.engine.kernels.products.bounded_products import (
    Doubles,
    QueryRows,
    exact_product,
    in_steps,
    words_for_rows,
)
from service.engine.kernels.scores import finite
from service.engine.kernels.search import Work, end_of_group, group_tasks

IN_EXPERTS, ESCALATED, SCANNED = 0, 1, 2  # places in RUNGS
LARGEST_FEATURE, LARGEST_GAP = 30.0, 20.0
SEEDED = 16  # an expert with this part of all classes, or fewer, is searched for a threshold


# --- searching ---------------------------------------------------------------------------------


@forced
def search_expert(
    lists: ClassLists,
    e: int,
    hidden: Floats,  # [B,D]
    rows: QueryRows,
    group: Integers,  # the rows to search it for
    answers: Answers,
    scan: Scan,
) -> None:
    if lists.offsets[e] == lists.offsets[e + 1]:
        return
    width = hidden.shape[1]
    rest = lists.rest[e * (width + 1) : (e + 1) * (width + 1)]
    search_list(lists, e, hidden, rows, group, answers.best, scan, answers.logsumexps)
    for b in group:
        own = answers.logsumexps[b]
        if own > answers.largest[b]:
            outside = exact_product(hidden[b], rest[:width]) + rest[width]
            answers.largest[b], answers.outside[b] = own, outside
            top = max(own, outside)
            answers.normalisers[b] = top + np.log(np.exp(own - top) + np.exp(outside - top))


@ordered
def search_experts(
    lists: ClassLists,
    hidden: Floats,  # [B,D]
    rows: QueryRows,
    some: Integers,  # [n] rows
    experts: Integers,  # [n] of which each is searched for its row
    answers: Answers,
    scan: Scan,
    work: Work,
    scratch: Integers,  # [2n+2]
) -> None:
    """Rows of one expert together, so that its int8 rows stay in the caches."""
    n = some.shape[0]
    order, group, clock = scratch[:n], scratch[n : 2 * n], scratch[2 * n : 2 * n + 2]
    group_tasks(experts, lists.gate_bias.shape[0], order)
    end = 0
    while end < n:
        begin, end = end, end_of_group(experts, order, end)
        e = experts[order[begin]]
        started = nanoseconds(clock)
        for i in range(begin, end):
            group[i] = some[order[i]]
        search_expert(lists, e, hidden, rows, group[begin:end], answers, scan)
        if lists.offsets[e] < lists.offsets[e + 1]:
            work.seconds[e] += (nanoseconds(clock) - started) * 1e-9
            work.rows[e] += end - begin


@ordered
def classes_of(lists: ClassLists, which: int) -> int:
    return int(lists.offsets[which + 1] - lists.offsets[which])


@allocating
def fill_up(
    lists: ClassLists,
    hidden: Floats,  # [B,D]
    rows: QueryRows,
    b: int,
    searched: int,  # how many experts were searched for the row
    answers: Answers,
    scan: Scan,
    work: Work,
    scratch: Integers,
) -> int:
    """Searches a row's next-best experts until it has its k classes, and returns how many it then
    has searched; 0 if a scan of all classes is needed, or no more work."""
    k, n_experts = answers.best.classes.shape[1], lists.gate_bias.shape[0]
    ranked, gates = np.empty(n_experts, np.int64), np.empty(n_experts, np.float32)
    rank(hidden[b : b + 1], lists.gate, lists.gate_bias, ranked, gates)
    row, total = np.array([b]), 0
    for place in range(n_experts):
        if answers.best.counts[b] == k:
            return searched
        total += classes_of(lists, ranked[place])
        if total >= classes_of(lists, n_experts):
            return 0
        if place >= searched:
            one = ranked[place : place + 1]
            search_experts(lists, hidden, rows, row, one, answers, scan, work, scratch)
            searched = place + 1
    return searched if answers.best.counts[b] == k else 0


@forced
def search_ranked(
    lists: ClassLists,
    hidden: Floats,  # [B,D]
    rows: QueryRows,
    g: int,
    ranked: Integers,  # [B m]
    answers: Answers,
    scan: Scan,
    work: Work,
    filled: bool,  # also where a row's experts hold fewer than k classes
    searched: Integers,  # [B] to fill in: 0 if all classes are to be scanned
    scratch: Integers,  # [4B+2]
) -> None:
    """Each row's g best experts, and more where these hold fewer than k classes."""
    n, n_experts, k = hidden.shape[0], lists.gate_bias.shape[0], answers.best.classes.shape[1]
    m = ranked.shape[0] // n
    some, experts, more = scratch[:n], scratch[n : 2 * n], scratch[2 * n :]
    for b in range(n):
        total = 0
        for place in range(g):
            total += classes_of(lists, ranked[b * m + place])
        few = g < n_experts and total < classes_of(lists, n_experts)
        searched[b] = g if few else 0
    for place in range(g):
        count = 0
        for b in range(n):
            if searched[b] > 0:
                some[count], experts[count] = b, ranked[b * m + place]
                count += 1
        tasks = some[:count], experts[:count]
        search_experts(lists, hidden, rows, *tasks, answers, scan, work, more)
    for b in range(n):
        if filled and searched[b] > 0 and answers.best.counts[b] < k:
            searched[b] = fill_up(lists, hidden, rows, b, g, answers, scan, work, more)


# --- promises of recall ------------------------------------------------------------------------


@ordered
def clipped(value: float, low: float, high: float) -> np.float32:
    return np.float32(min(max(value, low), high))


@ordered
def describe(
    answers: Answers,
    b: int,
    gates: Floats,  # [m] of the row, the best first
    features: Floats,  # [F] to fill in
) -> None:
    """What a row's difficulty goes by, after its first expert was searched."""
    scores, k = answers.best.scores[b], answers.best.classes.shape[1]
    outside, normaliser = answers.outside[b], answers.normalisers[b]
    first = max(float(gates[0]), float(SMALLEST_GATE))
    second = max(float(gates[1]), float(SMALLEST_GATE)) if gates.shape[0] > 1 else first
    gap = scores[0] - scores[1] if k > 1 else 0.0
    low, high = -LARGEST_FEATURE, LARGEST_FEATURE
    features[0] = 1.0
    features[1] = clipped(outside - normaliser, low, high)
    features[2] = clipped(scores[0] - normaliser, low, high)
    features[3] = clipped(scores[k - 1] - normaliser, low, high)
    features[4] = clipped(outside - scores[k - 1], low, high)
    features[5] = clipped(np.log(first), low, high)
    features[6] = clipped(np.log(second / first), -LARGEST_GAP, 0.0)
    features[7] = clipped(gap, 0.0, LARGEST_GAP)


@ordered
def escalate(
    answers: Answers,
    ranked: Integers,  # [B m]
    gates: Floats,  # [B m]
    rule: Doubles,  # [F+K+1] weights, experts, threshold; or empty: only features are wanted
    features: Floats,  # [B,F] to fill in
    searched: Integers,  # [B]
    to_scan: Integers,  # [B] to fill in
) -> None:
    """Chooses the rows that are too difficult for one expert. One that holds fewer than k classes
    is never enough; such a row has no features."""
    n, k = answers.best.classes.shape
    m = gates.shape[0] // n
    for b in range(n):
        if searched[b] != 1 or answers.best.counts[b] < k:
            features[b, :] = np.nan
            to_scan[b] = 1
            continue
        describe(answers, b, gates[b * m : (b + 1) * m], features[b])
        if rule.shape[0] > 0:
            difficulty = rule[FEATURES + ranked[b * m]]
            for i in range(FEATURES):
                difficulty += rule[i] * features[b, i]
            to_scan[b] = difficulty > rule[rule.shape[0] - 1]


# --- what is called from Python ----------------------------------------------------------------


@forced
def answer_rows(
    lists: ClassLists,
    hidden: Floats,  # [B,D]
    g: int,  # 0: all classes are scanned
    ranked: Integers,  # [B m]
    gates: Floats,  # [B m]
    rule: Doubles,
    features: Floats,
    best_classes: Integers,  # [B,k]
    log_probs: Floats,  # [B,k]
    work: Work,
    told: Integers,  # [B] to fill in, or empty
    rungs: NDArray[np.uint8],  # likewise
    space: Doubles,
) -> None:
    n, k = best_classes.shape
    n_lists = lists.offsets.shape[0] - 1
    promised, everything = features.shape[0] > 0, n_lists - 1
    answers = make_answers(space, best_classes)
    to_scan, group = words(space, (k + 5) * n, n), words(space, (k + 6) * n, n)
    searched, scratch = words(space, (k + 7) * n, n), words(space, (k + 8) * n, 4 * n + 2)
    after = (k + 12) * n + 2
    rows = in_steps(lists, hidden, space[after:])
    after += words_for_rows(n, hidden.shape[1])
    scan = make_scan(space[after:], n, k, classes_of(lists, everything))
    if g > 0:
        filled = not promised
        search_ranked(
            lists, hidden, rows, g, ranked, answers, scan, work, filled, searched, scratch
        )
    else:
        searched[:] = 0
    to_scan[:] = 0
    if g > 0 and promised:
        escalate(answers, ranked, gates, rule, features, searched, to_scan)
    count = 0
    for b in range(n):
        if searched[b] == 0:
            to_scan[b] = 1
        if told.shape[0] > 0:
            rung = ESCALATED if to_scan[b] == 1 else IN_EXPERTS
            told[b], rungs[b] = searched[b], rung if searched[b] > 0 else SCANNED
        if to_scan[b] == 1:
            group[count] = b
            count += 1
    if count > 0 and not (promised and rule.shape[0] == 0):  # or else only features are wanted
        search_all(lists, hidden, rows, ranked, group[:count], answers, scan)
    for b in range(n):
        fill_in_log_probs(answers, b, log_probs)


@ordered
def search_all(
    lists: ClassLists,
    hidden: Floats,  # [B,D]
    rows: QueryRows,
    ranked: Integers,  # [B m]
    group: Integers,  # the rows to scan all classes for
    answers: Answers,
    scan: Scan,
) -> None:
    """Rows without answers are searched in their first expert before, if it is small: what that
    finds is a threshold that rules most classes out from the first one on."""
    best, everything = answers.best, lists.offsets.shape[0] - 2
    k, m = best.classes.shape[1], ranked.shape[0] // hidden.shape[0]
    for i in range(group.shape[0] if everything > 0 else 0):
        e = ranked[group[i] * m]
        few = SEEDED * classes_of(lists, e) <= classes_of(lists, everything)
        if best.counts[group[i]] == 0 and few and classes_of(lists, e) >= k:
            one = group[i : i + 1]
            search_list(lists, e, hidden, rows, one, best, scan, answers.logsumexps)
    search_list(lists, everything, hidden, rows, group, best, scan, answers.normalisers)


@ordered
def words_for(n: int, k: int, width: int, size: int) -> int:
    """How many words of space `answer_rows` needs."""
    return (k + 12) * n + 2 + words_for_rows(n, width) + scan_words(n, k, size)


@compiled(
    ORDERED,
    types.int64(
        INTEGERS, ROWS, types.int64, COUNTS, types.float32[::1], given(types.float64, 1),
        FLOAT_TABLE, INTEGER_TABLE, FLOAT_TABLE, SECONDS, COUNTS, COUNTS, types.uint8[::1],
    ),
    allocates=True,
)  # fmt: skip
def answer(
    packed: Integers,
    hidden: Floats,  # [B,D]
    g: int,  # experts to search; 0: all classes are scanned
    ranked: Integers,  # [B m] to fill in, m at least g
    gates: Floats,  # [B m] to fill in
    rule: Doubles,  # [F+K+1] of a promise, or empty
    features: Floats,  # [B,F] to fill in, of a promise; or [0,F]
    best_classes: Integers,  # [B,k] to fill in
    log_probs: Floats,  # [B,k] to fill in
    seconds: Doubles,  # [K] to fill in
    worked: Integers,  # [K] to fill in
    searched: Integers,  # [B] to fill in, or empty
    rungs: NDArray[np.uint8],  # [B] to fill in, or empty
) -> int:
    """The k best classes of each row. Returns the gate's nanoseconds, or NOT_FINITE."""
    if not finite(hidden):
        return NOT_FINITE
    lists = unpack(packed)
    inputs, firsts, shares = borrowed(hidden), borrowed(ranked), borrowed(gates)
    gate_time = rank(inputs, lists.gate, lists.gate_bias, firsts, shares)
    n, k = best_classes.shape
    size = classes_of(lists, lists.offsets.shape[0] - 2)
    space = np.empty(words_for(n, k, hidden.shape[1], size), np.float64)
    seconds[:], worked[:] = 0, 0
    answer_rows(
        lists,
        inputs,
        g,
        firsts,
        shares,
        borrowed(rule),
        borrowed(features),
        borrowed(best_classes),
        borrowed(log_probs),
        Work(borrowed(seconds), borrowed(worked)),
        borrowed(searched),
        borrowed(rungs),
        borrowed(space),
    )
    space[0] = 0  # until here it is borrowed from
    return gate_time
