"""The backend that answers from a bundle's numbers in compiled loops.

B rows, D hidden, K experts, R classes of all experts, k answers, g experts searched.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.bundle import Bundle, graphs
from service.engine.backend import Backend, not_finite
from service.engine.kernels import search
from service.engine.kernels.gate import rank_experts
from service.engine.kernels.layer import Layer, pack
from service.errors import BackendUnsuitable
from service.topk import TopK

INT64, FLOAT32 = (
    np.dtype(np.int64),
    np.dtype(np.float32),
)  # np.empty takes twice as long to look up a type
ROWS_PER_THREAD = 16  # fewer take longer to hand over than to answer


class CompiledBackend(Backend):
    def __init__(self, bundle: Bundle, threads: int = 1) -> None:
        if bundle.shared is not None:
            raise BackendUnsuitable("Experts that share the head's rows are merged by score.")
        if any(preview is not None for preview in bundle.previews):
            raise BackendUnsuitable(
                "The bundle has approximated experts, which only the onnx backend serves."
            )
        self._n_experts = bundle.manifest.n_experts
        gate = graphs.constants(bundle.gate_model)
        self._gate = (
            np.ascontiguousarray(gate["U"].T).ravel(),  # [D K]
            gate.get("bias", np.zeros(self._n_experts, np.float32)),  # [K]
        )
        weights, biases, scales = _numbers(bundle)
        halves = weights.dtype == np.uint16
        self._kernel = search.answer_from(np.uint16 if halves else np.float32)
        self._layer = Layer(
            *self._gate,
            weights,
            biases,
            np.empty(0, np.int8) if bundle.quantised is None else bundle.quantised,
            scales,
            bundle.offsets.astype(np.int64),
            bundle.classes,
            bundle.manifest.n_classes,
        )
        self._packed = pack(self._layer)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def topk(
        self, hidden: NDArray[np.float32], k: int, experts: int, needed: int | None = None
    ) -> TopK:
        n, needed = len(hidden), needed or k
        ranked, gates = np.empty(n * experts, INT64), np.empty(n * experts, FLOAT32)
        if self._pool is None or n < 2 * ROWS_PER_THREAD:
            return self._answer(hidden, False, ranked, gates, k, needed)
        gate_nanoseconds = rank_experts(hidden, *self._gate, ranked, gates)
        if gate_nanoseconds < 0:
            raise not_finite(hidden)
        return self._answer_in_parts(
            self._pool,
            hidden,
            ranked.reshape(n, experts),
            gates.reshape(n, experts),
            gate_nanoseconds * 1e-9,
            k,
            needed,
        )

    def _answer(
        self,
        hidden: NDArray[np.float32],
        is_ranked: bool,
        ranked: NDArray[np.int64],  # [B g]
        gates: NDArray[np.float32],  # [B g]
        k: int,
        needed: int,
    ) -> TopK:
        n, n_experts = len(hidden), self._n_experts
        classes, log_probs = np.empty((n, k), INT64), np.empty((n, k), FLOAT32)
        rows, seconds = np.empty(n_experts, INT64), np.empty(n_experts)
        gate_nanoseconds = self._kernel(
            self._packed,
            hidden,
            is_ranked,
            ranked,
            gates,
            classes,
            log_probs,
            needed,
            seconds,
            rows,
        )
        if gate_nanoseconds < 0:
            raise not_finite(hidden)
        if len(ranked) > n:
            g = len(ranked) // n
            ranked, gates = ranked[::g], gates[::g]
        return TopK(classes, log_probs, ranked, gates, gate_nanoseconds * 1e-9, rows, seconds)

    def _answer_in_parts(
        self,
        pool: ThreadPoolExecutor,
        hidden: NDArray[np.float32],
        ranked: NDArray[np.int64],  # [B,g]
        gates: NDArray[np.float32],  # [B,g]
        gate_seconds: float,
        k: int,
        needed: int,
    ) -> TopK:
        """Splits a batch into equal parts, one for each thread, in the order of their experts."""
        parts = np.array_split(np.argsort(ranked[:, 0], kind="stable"), self._threads)
        answers = pool.map(
            lambda part: self._answer(
                hidden[part], True, ranked[part].ravel(), gates[part].ravel(), k, needed
            ),
            parts,
        )
        classes = np.empty((len(hidden), k), np.int64)
        log_probs = np.empty((len(hidden), k), np.float32)
        rows, seconds = np.zeros(self._n_experts, np.int64), np.zeros(self._n_experts)
        for part, found in zip(parts, answers, strict=True):
            classes[part], log_probs[part] = found.classes, found.log_probs
            rows += found.expert_rows
            seconds += found.expert_seconds
        return TopK(classes, log_probs, ranked[:, 0], gates[:, 0], gate_seconds, rows, seconds)


def _numbers(
    bundle: Bundle,
) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[np.float32]]:
    """Weights of all experts, one after the other [R D], biases [R] or none, scales [R] or none.

    Weights that the bundle has mapped are not copied; float16 are viewed as their bits.
    """
    hidden_size, n_rows = bundle.manifest.hidden_size, len(bundle.classes)
    stored, weights = bundle.weights, np.empty(0, np.float32)
    if stored is None:
        weights = np.empty(n_rows * hidden_size, np.float32)
    elif stored.dtype == np.float16:
        stored = stored.view(np.uint16)
    biases = np.zeros(n_rows, np.float32)
    scales = np.empty(n_rows if bundle.quantised is not None else 0, np.float32)
    biased = False
    for expert, model in enumerate(bundle.expert_models):
        if model is None:
            continue
        held = slice(bundle.offsets[expert], bundle.offsets[expert + 1])
        numbers = graphs.constants(model)
        if stored is None:
            columns = weights[held.start * hidden_size : held.stop * hidden_size]
            columns.reshape(hidden_size, -1)[:] = numbers["W"].T
        if "bias" in numbers:
            biases[held], biased = numbers["bias"], True
        if len(scales):
            scales[held] = numbers["scale"]
    return weights if stored is None else stored, biases if biased else biases[:0], scales
