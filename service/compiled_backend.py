"""A bundle's numbers in compiled loops. B rows, D hidden, K experts, k answers."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from service import graphs, kernels
from service.backend import NO_CLASS, Backend, ExpertRun, TopK
from service.bundle import Bundle
from service.errors import BackendUnsuitable

ROWS_PER_THREAD = 16  # fewer are not worth handing over


class CompiledBackend(Backend):
    def __init__(self, bundle: Bundle, threads: int = 1) -> None:
        if any(preview is not None for preview in bundle.previews):
            raise BackendUnsuitable(
                "The bundle has approximated experts, which only the onnx backend serves."
            )
        self._n_classes, self._n_experts = bundle.manifest.n_classes, bundle.manifest.n_experts
        self._offsets = bundle.offsets.astype(np.int64)
        self._classes = bundle.classes
        gate = graphs.constants(bundle.gate_model)
        self._gate = np.ascontiguousarray(gate["U"].T).ravel()  # [D K]
        self._gate_bias = gate.get("bias", np.zeros(self._n_experts, np.float32))  # [K]
        self._weights, self._biases = _columns(bundle)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def rank(
        self, hidden: NDArray[np.float32], ranks: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        ranked = np.empty((len(hidden), ranks), np.int64)
        gates = np.empty((len(hidden), ranks), np.float32)
        kernels.rank_experts(hidden, self._gate, self._gate_bias, ranks, ranked, gates)
        return ranked, gates

    def search(
        self,
        hidden: NDArray[np.float32],
        experts: NDArray[np.int64],
        temperatures: NDArray[np.float32],
        distrust: NDArray[np.float32],
        k: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], list[ExpertRun]]:
        if self._pool is None or len(hidden) < 2 * ROWS_PER_THREAD:
            rows = np.arange(len(hidden))
            return self._search(hidden, rows, experts, temperatures, distrust, k)
        order = np.argsort(experts, kind="stable")
        parts = np.array_split(order, self._threads)
        answers = self._pool.map(
            lambda part: self._search(
                hidden, part, experts[part], temperatures[part], distrust[part], k
            ),
            parts,
        )
        classes = np.empty((len(hidden), k), np.int64)
        log_probs = np.empty((len(hidden), k), np.float32)
        runs: list[ExpertRun] = []
        for part, (found, scores, more) in zip(parts, answers, strict=True):
            classes[part], log_probs[part] = found, scores
            runs += more
        return classes, log_probs, runs

    def _search(
        self,
        hidden: NDArray[np.float32],  # [B,D]
        rows: NDArray[np.int64],  # [b] of hidden; all others are [b] as well
        experts: NDArray[np.int64],
        temperatures: NDArray[np.float32],
        distrust: NDArray[np.float32],
        k: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], list[ExpertRun]]:
        classes = np.full((len(rows), k), NO_CLASS, np.int64)
        log_probs = np.full((len(rows), k), -np.inf, np.float32)
        seconds, counts = self._empty_times()
        kernels.search(
            hidden,
            rows,
            np.ascontiguousarray(experts),
            np.ascontiguousarray(temperatures),
            distrust,
            self._weights,
            self._biases,
            self._offsets,
            self._classes,
            self._n_classes,
            k,
            classes,
            log_probs,
            seconds,
            counts,
        )
        return classes, log_probs, _runs(seconds, counts)

    def first(self, hidden: NDArray[np.float32], k: int) -> TopK:
        if self._pool is not None and len(hidden) >= 2 * ROWS_PER_THREAD:
            return super().first(hidden, k)
        n = len(hidden)
        classes, log_probs = np.empty((n, k), np.int64), np.empty((n, k), np.float32)
        experts, gates = np.empty(n, np.int64), np.empty(n, np.float32)
        seconds, counts = self._empty_times()
        gate_nanoseconds = kernels.answer_first(
            hidden,
            self._gate,
            self._gate_bias,
            self._weights,
            self._biases,
            self._offsets,
            self._classes,
            self._n_classes,
            k,
            classes,
            log_probs,
            experts,
            gates,
            seconds,
            counts,
        )
        runs = tuple(_runs(seconds, counts))
        return TopK(classes, log_probs, experts, gates, gate_nanoseconds * 1e-9, runs)

    def _empty_times(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        return np.zeros(self._n_experts), np.empty(self._n_experts, np.int64)


def _runs(seconds: NDArray[np.float64], counts: NDArray[np.int64]) -> list[ExpertRun]:
    """Experts that hold no class are not run."""
    ran = np.flatnonzero(seconds)
    columns = zip(ran.tolist(), counts[ran].tolist(), seconds[ran].tolist(), strict=True)
    return [ExpertRun(*column) for column in columns]


def _columns(bundle: Bundle) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Every expert's matrix by column, one after the other [R D], and biases [R], if there are."""
    hidden_size = bundle.manifest.hidden_size
    weights = np.empty(len(bundle.classes) * hidden_size, np.float32)
    biases = np.zeros(len(bundle.classes), np.float32)
    biased = False
    for expert, model in enumerate(bundle.expert_models):
        if model is None:
            continue
        held = slice(bundle.offsets[expert], bundle.offsets[expert + 1])
        numbers = graphs.constants(model)
        columns = weights[held.start * hidden_size : held.stop * hidden_size]
        columns.reshape(hidden_size, -1)[:] = numbers["W"].T
        if "bias" in numbers:
            biases[held], biased = numbers["bias"], True
    return weights, biases if biased else biases[:0]
