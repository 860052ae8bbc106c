"""Top-k answers from a bundle. Knows arrays; knows no HTTP and no asyncio.

B rows, D hidden, K experts, k answers, g experts searched, C candidates.
"""

from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from service.backend import NO_CLASS, Backend, Candidates, ExpertRun, TopK
from service.bundle import Bundle
from service.errors import EmptyBatch, ExpertsOutOfRange, KOutOfRange, NotFinite, WrongWidth
from service.onnx_backend import OnnxBackend

BackendName = Literal["auto", "compiled", "onnx"]

SMALLEST_GATE = np.finfo(np.float32).tiny


class Engine:
    """Answers top-k queries; safe to call from several threads."""

    def __init__(self, bundle: Bundle, threads: int = 1, backend: BackendName = "auto") -> None:
        manifest = bundle.manifest
        self.n_classes = manifest.n_classes
        self.hidden_size = manifest.hidden_size
        self.n_experts = manifest.n_experts
        self.expert_sizes = tuple(manifest.expert_sizes)
        self._smallest = min(self.expert_sizes)
        self.n_reachable = len(np.unique(bundle.classes))
        self._backend = make_backend(bundle, threads, backend)

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
        finite = np.isfinite(hidden)
        if not finite.all():
            row = int(np.argmin(finite.all(axis=1)))
            raise NotFinite(f"Row {row} holds a NaN or an infinity.")

    def topk(self, hidden: NDArray[np.float32], k: int, experts: int = 1) -> TopK:
        """The k most probable classes of each row, searched in its `experts` best experts.

        A row whose experts hold fewer than k classes between them goes on to its next-best ones.
        """
        self.check(hidden, k, experts)
        hidden = np.require(hidden, np.float32, ("C_CONTIGUOUS", "ALIGNED"))
        if experts == 1 and k <= self._smallest:
            return self._backend.first(hidden, k)
        return self._searched(hidden, k, experts)

    def _searched(self, hidden: NDArray[np.float32], k: int, experts: int) -> TopK:
        # Deeper ranks are needed only if some expert could leave a row short of k classes.
        ranks = experts if k <= self._smallest else self.n_experts
        started = perf_counter()
        ranked, gates = self._backend.rank(hidden, ranks)  # [B,g] each
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
        temperatures = gates[rows, 0]  # [b]
        distrust = np.log(np.maximum(gates[rows, rank], SMALLEST_GATE) / temperatures)  # [b]
        classes, log_probs, more = self._backend.search(
            hidden[rows], ranked[rows, rank], temperatures, distrust, k
        )
        runs += more
        return classes, log_probs


def make_backend(bundle: Bundle, threads: int, name: BackendName) -> Backend:
    """By default compiled loops, but for approximated experts, which only ONNX Runtime runs."""
    approximated = any(preview is not None for preview in bundle.previews)
    if name == "onnx" or (name == "auto" and approximated):
        return OnnxBackend(bundle, threads)
    from service.compiled_backend import CompiledBackend  # compiles, or reads what was compiled

    return CompiledBackend(bundle, threads)


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
        return classes, log_probs
    by_class = np.lexsort((-log_probs, classes), axis=1)
    classes = np.take_along_axis(classes, by_class, axis=1)
    log_probs = np.take_along_axis(log_probs, by_class, axis=1)
    repeated = classes[:, 1:] == classes[:, :-1]
    classes[:, 1:][repeated] = NO_CLASS
    log_probs[:, 1:][repeated] = -np.inf
    order = np.lexsort((classes, -log_probs), axis=1)[:, :k]
    return np.take_along_axis(classes, order, axis=1), np.take_along_axis(log_probs, order, axis=1)
