"""Top-k answers from a bundle. Knows arrays and ONNX Runtime; knows no HTTP and no asyncio.

B rows, D hidden, K experts, k answers, g experts searched, C candidates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from service.bundle import Bundle
from service.errors import EmptyBatch, ExpertsOutOfRange, KOutOfRange, NotFinite, WrongWidth

Candidates = tuple[NDArray[np.int64], NDArray[np.float32]]  # classes and log-probabilities

NO_CLASS = -1
GATHERED_AT_ONCE = 2**22  # numbers of candidates' rows that an approximated expert gathers: 16 MB
SMALLEST_GATE = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class ExpertRun:
    """One execution of one expert."""

    expert: int
    rows: int
    seconds: float


@dataclass(frozen=True)
class TopK:
    classes: NDArray[np.int64]  # [B,k]
    log_probs: NDArray[np.float32]  # [B,k] descending, ties by class id
    experts: NDArray[np.int64]  # [B] the gate's first choice
    gates: NDArray[np.float32]  # [B] its gate value
    gate_seconds: float
    runs: tuple[ExpertRun, ...]


class Engine:
    """Answers top-k queries; safe to call from several threads."""

    def __init__(self, bundle: Bundle, threads: int = 1) -> None:
        manifest = bundle.manifest
        self.n_classes = manifest.n_classes
        self.hidden_size = manifest.hidden_size
        self.n_experts = manifest.n_experts
        self.expert_sizes = tuple(manifest.expert_sizes)
        self._smallest = min(self.expert_sizes)
        self.n_reachable = len(np.unique(bundle.classes))
        self._previews = bundle.previews
        self._classes = [
            bundle.expert_classes(expert).astype(np.int64) for expert in range(self.n_experts)
        ]
        options = _session_options(threads)
        self._gate = _session(bundle.gate_model, options)
        self._experts = [
            None if model is None else _session(model, options) for model in bundle.expert_models
        ]

    def check(self, hidden: NDArray[np.generic], k: int, experts: int = 1) -> None:
        """Raise the QueryError that `topk` would."""
        if hidden.ndim != 2 or hidden.shape[1] != self.hidden_size:
            raise WrongWidth(
                f"Inputs have shape {list(hidden.shape)}; [rows, {self.hidden_size}] is expected."
            )
        if not len(hidden):
            raise EmptyBatch("Inputs hold no row.")
        if not 1 <= k <= self.n_reachable:
            raise KOutOfRange(f"k is {k}; this model answers k from 1 to {self.n_reachable}.")
        if not 1 <= experts <= self.n_experts:
            raise ExpertsOutOfRange(
                f"experts is {experts}; this model searches from 1 to {self.n_experts}."
            )
        finite = np.isfinite(hidden).all(axis=1)
        if not finite.all():
            raise NotFinite(f"Row {int(np.argmin(finite))} holds a NaN or an infinity.")

    def topk(self, hidden: NDArray[np.float32], k: int, experts: int = 1) -> TopK:
        """The k most probable classes of each row, searched in its `experts` best experts.

        A row whose experts hold fewer than k classes between them goes on to its next-best ones.
        """
        self.check(hidden, k, experts)
        hidden = np.ascontiguousarray(hidden, np.float32)
        # Deeper ranks are needed only if some expert could leave a row short of k classes.
        ranks = experts if k <= self._smallest else self.n_experts
        started = perf_counter()
        ranked, gates = self._gate.run(None, {"hidden": hidden, "g": np.array([ranks])})  # [B,g]
        gate_seconds = perf_counter() - started

        runs: list[ExpertRun] = []
        found = [
            self._search(hidden, gates, ranked, rank, k, slice(None), runs)
            for rank in range(experts)
        ]
        classes, log_probs = _best(*_side_by_side(found), k)
        for rank in range(experts, ranks):
            short = np.flatnonzero(classes[:, -1] == NO_CLASS)
            if not len(short):
                break
            more = self._search(hidden, gates, ranked, rank, k, short, runs)
            both = _side_by_side([(classes[short], log_probs[short]), more])
            classes[short], log_probs[short] = _best(*both, k)
        return TopK(classes, log_probs, ranked[:, 0], gates[:, 0], gate_seconds, tuple(runs))

    def _search(
        self,
        hidden: NDArray[np.float32],
        gates: NDArray[np.float32],
        ranked: NDArray[np.int64],
        rank: int,
        k: int,
        rows: NDArray[np.int64] | slice,
        runs: list[ExpertRun],
    ) -> Candidates:
        """Candidates of each row's expert at `rank`: classes and log-probabilities, [rows,k].

        The best gate value is the row's inverse temperature in whichever expert is searched, and
        a lower-ranked expert's log-probabilities are lowered by how much less the gate trusts it.
        """
        hidden, chosen = hidden[rows], ranked[rows, rank]  # [b,D], [b]
        temperature = gates[rows, :1]  # [b,1]
        distrust = np.log(np.maximum(gates[rows, rank], SMALLEST_GATE) / gates[rows, 0])  # [b]
        classes = np.full((len(hidden), k), NO_CLASS, np.int64)
        log_probs = np.full((len(hidden), k), -np.inf, np.float32)
        for expert, group in _groups(chosen):
            session = self._experts[expert]
            if session is None:
                continue
            held = min(k, self.expert_sizes[expert])
            for part in self._parts(expert, held, group):
                started = perf_counter()
                score, position, logsumexp = session.run(
                    None,
                    {"hidden": hidden[part], "gate": temperature[part], "k": np.array([held])},
                )  # [b,held], [b,held], [b,1]
                runs.append(ExpertRun(expert, len(part), perf_counter() - started))
                classes[part, :held] = self._classes[expert][position]
                log_probs[part, :held] = score - logsumexp + distrust[part, None]
        return classes, log_probs

    def _parts(self, expert: int, k: int, group: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """The rows that an expert takes together: all, unless it gathers candidates for each."""
        preview, rows = self._previews[expert], len(group)
        if preview is not None:
            gathered = max(k, preview.candidates) * self.hidden_size
            rows = max(1, GATHERED_AT_ONCE // gathered)
        for first in range(0, len(group), rows):
            yield group[first : first + rows]


def _side_by_side(found: list[Candidates]) -> Candidates:
    """[B,k] candidates of several experts as one [B,C]."""
    if len(found) == 1:
        return found[0]
    return (
        np.concatenate([classes for classes, _ in found], axis=1),
        np.concatenate([log_probs for _, log_probs in found], axis=1),
    )


def _best(classes: NDArray[np.int64], log_probs: NDArray[np.float32], k: int) -> Candidates:
    """Of [B,C] candidates the k best, each class once with its best score; NO_CLASS where short."""
    if classes.shape[1] == k:
        # One expert's answer is in order already, but for ties that rounding has made.
        tied = log_probs[:, 1:] == log_probs[:, :-1]
        if not (tied & (classes[:, 1:] < classes[:, :-1])).any():
            return classes, log_probs
    else:
        by_class = np.lexsort((-log_probs, classes), axis=1)
        classes = np.take_along_axis(classes, by_class, axis=1)
        log_probs = np.take_along_axis(log_probs, by_class, axis=1)
        repeated = classes[:, 1:] == classes[:, :-1]
        classes[:, 1:][repeated] = NO_CLASS
        log_probs[:, 1:][repeated] = -np.inf
    order = np.lexsort((classes, -log_probs), axis=1)[:, :k]
    return np.take_along_axis(classes, order, axis=1), np.take_along_axis(log_probs, order, axis=1)


def _groups(chosen: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each expert that occurs, with the positions of its rows."""
    order = np.argsort(chosen, kind="stable")
    in_order = chosen[order]
    ends = np.flatnonzero(in_order[1:] != in_order[:-1]) + 1
    first = 0
    for end in [*ends.tolist(), len(order)]:
        yield int(in_order[first]), order[first:end]
        first = end


def _session_options(threads: int) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return options


def _session(model: bytes, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
