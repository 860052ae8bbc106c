"""The backend that answers from the head's own rows: exactly, or within some experts.

B rows, D hidden, K experts, N classes, R classes of all experts, k answers, g experts searched,
F features.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.bundle import Bundle, graphs
from service.bundle.contract import FEATURES, Rule
from service.bundle.head_rows import HeadRows
from service.engine.backend import Backend, not_finite
from service.engine.kernels import fidelity, one_row
from service.engine.kernels.class_lists import ClassLists, pack
from service.engine.kernels.rescoring import rescore
from service.topk import TopK

ROWS_PER_THREAD = 16  # fewer take longer to hand over than to answer
INT64, FLOAT32 = (
    np.dtype(np.int64),
    np.dtype(np.float32),
)  # np.empty takes longer with a type's name
NO_RULE, NO_FEATURES = np.empty(0), np.empty((0, FEATURES), FLOAT32)
GATE_NANOSECONDS = 2**one_row.EXPERT_BITS - 1
NOT_SEARCHED, NO_RUNGS = np.empty(0, INT64), np.empty(0, np.uint8)


class FidelityBackend(Backend):
    def __init__(self, bundle: Bundle, rows: HeadRows, threads: int = 1) -> None:
        """Of an accuracy bundle, only all classes can be scanned, and candidates scored again."""
        self._n_experts = bundle.manifest.n_experts
        self._hidden_size = bundle.manifest.hidden_size
        self._lists = _lists(bundle, rows)
        self._packed = pack(self._lists)
        self._address = int(self._packed.ctypes.data)
        self._searched_once = _searched_once(self._n_experts)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def topk(
        self, hidden: NDArray[np.float32], k: int, experts: int, needed: int | None = None
    ) -> TopK:
        del needed  # k are always found
        if self._pool is None or len(hidden) < 2 * ROWS_PER_THREAD:
            return self._call(hidden, k, experts, NO_RULE, NO_FEATURES, False)
        return self._answer(hidden, k, experts)._replace(searched=None, rungs=None)

    def one_row(self, hidden: NDArray[np.float32], k: int) -> TopK | None:
        classes, log_probs = np.empty((1, k), INT64), np.empty((1, k), FLOAT32)
        gates, seconds = np.empty(1, FLOAT32), np.empty(self._n_experts)
        done = one_row.call(self._address, hidden, classes, log_probs, gates, seconds)
        if done < 0:
            return None
        experts, rows = self._searched_once[done >> one_row.EXPERT_BITS]
        gate_seconds = (done & GATE_NANOSECONDS) * 1e-9
        found = classes, log_probs, experts, gates, gate_seconds, rows, seconds, None, None
        return tuple.__new__(TopK, found)  # TopK(...) would be one call more

    def exact(self, hidden: NDArray[np.float32], k: int) -> TopK:
        """The k best of all classes."""
        return self._answer(hidden, k, 0)

    def promised(self, hidden: NDArray[np.float32], k: int, rule: Rule) -> TopK:
        """From each row's first expert, or of all classes where the row is too difficult."""
        numbers = np.array([*rule.weights, *rule.experts, rule.threshold])
        return self._answer(hidden, k, 1, numbers)

    def rescored(
        self, hidden: NDArray[np.float32], k: int, candidates: TopK
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The k best of a layer's answers by the head's own rows, and their log-probabilities."""
        classes, log_probs = np.empty((len(hidden), k), np.int64), np.empty((len(hidden), k), "f4")
        everything = int(self._lists.offsets[-2])
        biases = self._lists.biases[everything:]
        found = candidates.classes, candidates.log_probs
        rescore(self._lists.weights, biases, hidden, *found, classes, log_probs)
        return classes, log_probs

    def features(self, hidden: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], TopK]:
        """What a row's difficulty goes by [B,F], and the answers of its first expert.

        Where that holds fewer than k classes there are no features but NaN, and no answer: such a
        row is always answered exactly.
        """
        features = np.empty((len(hidden), FEATURES), np.float32)
        return features, self._call(hidden, k, 1, NO_RULE, features)

    def _answer(
        self, hidden: NDArray[np.float32], k: int, experts: int, rule: NDArray[np.float64] = NO_RULE
    ) -> TopK:
        n = len(hidden) if len(rule) else 0  # features are needed for a rule only
        features = np.empty((n, FEATURES), np.float32) if n else NO_FEATURES
        if self._pool is None or len(hidden) < 2 * ROWS_PER_THREAD:
            return self._call(hidden, k, experts, rule, features)
        parts = np.array_split(np.arange(len(hidden)), self._threads)
        found = list(
            self._pool.map(
                lambda part: self._call(
                    hidden[part], k, experts, rule, features[part] if n else features
                ),
                parts,
            )
        )
        return _joined(found)

    def _call(
        self,
        hidden: NDArray[np.float32],
        k: int,
        experts: int,
        rule: NDArray[np.float64],
        features: NDArray[np.float32],
        told: bool = True,  # how each row was answered
    ) -> TopK:
        n, n_experts = len(hidden), self._n_experts
        ranks = min(max(experts, 2 if len(features) else 1), n_experts)
        ranked, gates = np.empty(n * ranks, INT64), np.empty(n * ranks, FLOAT32)
        classes, log_probs = np.empty((n, k), INT64), np.empty((n, k), FLOAT32)
        rows, seconds = np.empty(n_experts, INT64), np.empty(n_experts)
        searched = np.empty(n, INT64) if told else NOT_SEARCHED
        rungs = np.empty(n, np.uint8) if told else NO_RUNGS
        gate_nanoseconds = fidelity.answer(
            self._packed,
            hidden,
            experts,
            ranked,
            gates,
            rule,
            features,
            classes,
            log_probs,
            seconds,
            rows,
            searched,
            rungs,
        )
        if gate_nanoseconds < 0:
            raise not_finite(hidden)
        if ranks > 1:
            ranked, gates = ranked[::ranks], gates[::ranks]
        gate_seconds = gate_nanoseconds * 1e-9
        if not told:
            return TopK(classes, log_probs, ranked, gates, gate_seconds, rows, seconds)
        return TopK(classes, log_probs, ranked, gates, gate_seconds, rows, seconds, searched, rungs)


def _searched_once(n_experts: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """For each expert, the `experts` and `expert_rows` of an answer from it alone: read-only, as
    answers share them."""
    numbers, counts = np.arange(n_experts), np.zeros(2 * n_experts - 1, np.int64)
    counts[n_experts - 1] = 1
    numbers.flags.writeable = counts.flags.writeable = False
    first = n_experts - 1
    return [
        (numbers[e : e + 1], counts[first - e : first - e + n_experts]) for e in range(n_experts)
    ]


def _joined(parts: list[TopK]) -> TopK:
    """Of consecutive rows."""
    rows = ("classes", "log_probs", "experts", "gates", "searched", "rungs")
    sums = ("gate_seconds", "expert_rows", "expert_seconds")
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in rows
    }
    joined |= {name: sum(getattr(part, name) for part in parts) for name in sums}
    return TopK(**joined)


def _lists(bundle: Bundle, rows: HeadRows) -> ClassLists:
    """One list for each expert that shares the head's rows, and one of all classes."""
    gate = graphs.constants(bundle.gate_model)
    n_classes, n_experts = len(rows.weights), bundle.manifest.n_experts
    shared = bundle.shared is not None
    everything = np.arange(n_classes, dtype=np.int32)
    classes = np.concatenate([bundle.classes, everything]) if shared else everything
    held = bundle.offsets if shared else np.zeros(1, np.int64)
    biases, slack = np.empty(0, np.float32), 0.0
    if rows.bias is not None:
        biases = rows.bias[classes]
        slack = float(np.abs(rows.bias).max()) * 2.0**-50
    return ClassLists(
        gate=np.ascontiguousarray(gate["U"].T).ravel(),
        gate_bias=gate.get("bias", np.zeros(n_experts, np.float32)),
        weights=rows.weights.reshape(-1),
        quantised=rows.quantised.reshape(-1),
        offsets=np.append(held, held[-1] + n_classes).astype(np.int64),
        classes=classes,
        scales=rows.scales[classes],
        errors=rows.errors[classes],
        lengths=rows.lengths[classes],
        biases=biases,
        rest=np.empty(0, np.float32) if bundle.rest is None else bundle.rest.reshape(-1),
        facts=np.array([rows.longest, slack]),
    )
