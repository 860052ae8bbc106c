"""The backend that runs each of a bundle's graphs in an ONNX Runtime session.

B rows, b rows of a part, D hidden, K experts, k answers, g experts searched, C candidates.
"""

from collections.abc import Iterator
from time import perf_counter

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from service.bundle import Bundle
from service.engine.backend import Backend, not_finite
from service.engine.kernels.scores import all_finite
from service.errors import BackendUnsuitable
from service.topk import NO_CLASS, TopK

GATHERED_AT_ONCE = 2**22  # numbers of candidates' rows that an approximated expert gathers: 16 MB
SMALLEST_GATE = np.finfo(np.float32).tiny

Candidates = tuple[NDArray[np.int64], NDArray[np.float32]]  # classes and log-probabilities


class OnnxBackend(Backend):
    def __init__(self, bundle: Bundle, threads: int = 1) -> None:
        if bundle.shared is not None:
            raise BackendUnsuitable("Experts that share the head's rows are merged by score.")
        self._n_experts = bundle.manifest.n_experts
        self._hidden_size = bundle.manifest.hidden_size
        self._sizes = bundle.manifest.expert_sizes
        self._smallest = min(self._sizes)
        self._gathered = [bundle.gathered(expert) for expert in range(self._n_experts)]
        self._classes = [
            bundle.expert_classes(expert).astype(np.int64) for expert in range(self._n_experts)
        ]
        self._gate = session(bundle.gate_model, {}, threads)
        self._experts = [
            None if model is None else session(model, bundle.external(expert), threads)
            for expert, model in enumerate(bundle.expert_models)
        ]

    def topk(
        self, hidden: NDArray[np.float32], k: int, experts: int, needed: int | None = None
    ) -> TopK:
        if not all_finite(hidden):
            raise not_finite(hidden)
        needed = needed or k
        # Deeper ranks are needed only if some expert could leave a row short of classes.
        ranks = experts if needed <= self._smallest else self._n_experts
        started = perf_counter()
        ranked, gates = self._gate.run(None, {"hidden": hidden, "g": np.array([ranks])})  # [B,g]
        gate_seconds = perf_counter() - started

        work = Work(self._n_experts)
        found = [
            self._search(hidden, gates, ranked, rank, k, slice(None), work)
            for rank in range(experts)
        ]
        classes, log_probs = best_of_each(*side_by_side(found), k)
        for rank in range(experts, ranks):
            short = np.flatnonzero(classes[:, needed - 1] == NO_CLASS)
            if not len(short):
                break
            more = self._search(hidden, gates, ranked, rank, k, short, work)
            both = side_by_side([(classes[short], log_probs[short]), more])
            classes[short], log_probs[short] = best_of_each(*both, k)
        return TopK(
            classes, log_probs, ranked[:, 0], gates[:, 0], gate_seconds, work.rows, work.seconds
        )

    def _search(
        self,
        hidden: NDArray[np.float32],
        gates: NDArray[np.float32],
        ranked: NDArray[np.int64],
        rank: int,
        k: int,
        rows: NDArray[np.int64] | slice,
        work: "Work",
    ) -> Candidates:
        """Candidates of each row's expert at `rank`: classes and log-probabilities, [b,k].

        NO_CLASS and minus infinity where an expert holds fewer than k.
        """
        hidden, experts = hidden[rows], ranked[rows, rank]
        temperatures = gates[rows, 0]  # [b]
        log_ratios = np.log(np.maximum(gates[rows, rank], SMALLEST_GATE) / temperatures)  # [b]
        classes = np.full((len(hidden), k), NO_CLASS, np.int64)
        log_probs = np.full((len(hidden), k), -np.inf, np.float32)
        for expert, group in groups_of(experts):
            graph = self._experts[expert]
            if graph is None:
                continue
            held = min(k, self._sizes[expert])
            for part in self._parts(expert, held, group):
                gate = temperatures[part, None]  # [b,1]
                started = perf_counter()
                score, position, logsumexp = graph.run(
                    None, {"hidden": hidden[part], "gate": gate, "k": np.array([held])}
                )  # [b,held], [b,held], [b,1]
                work.seconds[expert] += perf_counter() - started
                work.rows[expert] += len(part)
                classes[part, :held] = self._classes[expert][position]
                log_probs[part, :held] = score - logsumexp + log_ratios[part, None]
        order_ties(classes, log_probs)
        return classes, log_probs

    def _parts(self, expert: int, k: int, group: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """The rows that one call scores: all, unless the expert gathers candidates for each."""
        rows, gathered = len(group), self._gathered[expert]
        if gathered:
            rows = max(1, GATHERED_AT_ONCE // (max(k, gathered) * self._hidden_size))
        for first in range(0, len(group), rows):
            yield group[first : first + rows]


class Work:
    """Rows and seconds of each expert in one call."""

    def __init__(self, n_experts: int) -> None:
        self.rows = np.zeros(n_experts, np.int64)
        self.seconds = np.zeros(n_experts)


def order_ties(classes: NDArray[np.int64], log_probs: NDArray[np.float32]) -> None:
    """Orders ties by class id; scores are in order, but rounding may have made new ties."""
    tied = log_probs[:, 1:] == log_probs[:, :-1]
    wrong = (tied & (classes[:, 1:] < classes[:, :-1]) & (classes[:, 1:] != NO_CLASS)).any(axis=1)
    if wrong.any():
        order = np.lexsort((classes[wrong], -log_probs[wrong]), axis=1)
        classes[wrong] = np.take_along_axis(classes[wrong], order, axis=1)


def groups_of(chosen: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each expert that occurs, with the positions of its rows."""
    order = np.argsort(chosen, kind="stable")
    in_order = chosen[order]
    ends = np.flatnonzero(in_order[1:] != in_order[:-1]) + 1
    first = 0
    for end in [*ends.tolist(), len(order)]:
        yield int(in_order[first]), order[first:end]
        first = end


def side_by_side(found: list[Candidates]) -> Candidates:
    """[B,k] candidates of several experts as one [B,C]."""
    if len(found) == 1:
        return found[0]
    return (
        np.concatenate([classes for classes, _ in found], axis=1),
        np.concatenate([log_probs for _, log_probs in found], axis=1),
    )


def best_of_each(classes: NDArray[np.int64], log_probs: NDArray[np.float32], k: int) -> Candidates:
    """Of [B,C] candidates the k best, each class once with its best score; NO_CLASS where short."""
    if classes.shape[1] == k:
        return classes, log_probs
    by_class = np.lexsort((-log_probs, classes), axis=1)
    classes = np.take_along_axis(classes, by_class, axis=1)
    log_probs = np.take_along_axis(log_probs, by_class, axis=1)
    repeated = classes[:, 1:] == classes[:, :-1]
    classes[:, 1:][repeated] = NO_CLASS
    log_probs[:, 1:][repeated] = -np.inf
    order = np.lexsort((classes, -log_probs), axis=1)[:, :k]
    return np.take_along_axis(classes, order, axis=1), np.take_along_axis(log_probs, order, axis=1)


def session(
    model: bytes, external: dict[str, NDArray[np.generic]], threads: int
) -> onnxruntime.InferenceSession:
    """A session of one graph; `external` are the arrays it keeps outside itself, not copied."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    if external:
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in external.values()]
        options.add_external_initializers(list(external), values)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
