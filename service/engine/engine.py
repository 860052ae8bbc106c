"""Top-k answers from a bundle. Knows arrays; knows no HTTP and no asyncio.

B rows, D hidden, K experts, k answers.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from service.bundle import Bundle
from service.engine.backend import Backend, not_finite
from service.engine.kernels.scores import all_finite
from service.errors import (
    EmptyBatch,
    ExpertsOutOfRange,
    KOutOfRange,
    ModesConflict,
    NoContract,
    NoHead,
    RecallOutOfRange,
    RescoreUnsuitable,
    WrongWidth,
)
from service.topk import SPARSE, Mode, Objective, TopK

BackendName = Literal["auto", "compiled", "onnx"]

FLOAT32 = np.dtype(np.float32)


class Engine:
    """Answers top-k queries; safe to call from several threads."""

    def __init__(
        self,
        bundle: Bundle,
        threads: int | None = 1,
        backend: BackendName = "auto",
        cpus: int = 1,
    ) -> None:
        """Without a number of threads the compiled backend uses one, the onnx backend `cpus`."""
        manifest = bundle.manifest
        self.n_classes = manifest.n_classes
        self.hidden_size = manifest.hidden_size
        self.n_experts = manifest.n_experts
        self.expert_sizes = tuple(manifest.expert_sizes)
        self.n_reachable = len(np.unique(bundle.classes))
        self.objective: Objective = manifest.objective
        self.contract = manifest.contract
        self.can_exact = False
        largest_first = np.sort(np.array(self.expert_sizes, np.int64))[::-1]
        # The classes of the g largest experts together.
        self._largest: list[int] = [0, *np.cumsum(largest_first).tolist()]
        self._smallest, self._mean = int(largest_first[-1]), max(1.0, float(largest_first.mean()))
        self._backend = make_backend(bundle, threads, backend, cpus)

    def check(self, hidden: NDArray[Any], k: int, experts: int = 1, mode: Mode = SPARSE) -> None:
        """Raise the QueryError that `topk` would."""
        plain = self._plain(hidden, k, experts)
        if mode != SPARSE:
            self._check_mode(experts, mode)
        if not all_finite(plain):
            raise not_finite(plain)

    def row_scores(self, k: int, experts: int, mode: Mode = SPARSE) -> int:
        """One for each expert in the gate, one for each class that is searched, and one for each
        of the candidates that are merged. Where experts are too small for k classes, further ones
        are searched."""
        searched = experts if k <= self._smallest else max(experts, 1 + int(k / self._mean))
        searched = min(max(searched, 1), self.n_experts)
        return self.n_experts + self._largest[searched] + searched * k

    def topk(
        self, hidden: NDArray[np.float32], k: int, experts: int = 1, mode: Mode = SPARSE
    ) -> TopK:
        """The k most probable classes of each row, searched in its `experts` best experts."""
        plain = self._plain(hidden, k, experts)
        if mode != SPARSE:
            self._check_mode(experts, mode)
        return self._backend.topk(plain, k, experts)

    def _check_mode(self, experts: int, mode: Mode) -> None:
        if mode.exact + mode.rescore + (mode.recall is not None) > 1:
            raise ModesConflict("Only one of exact, recall and rescore may be asked for.")
        if experts != 1 and not mode.rescore:
            raise ModesConflict("experts goes with neither exact nor recall, which choose them.")
        if mode.recall is not None and not 0 < mode.recall <= 1:
            raise RecallOutOfRange(
                f"recall is {mode.recall:g}; a share above 0 and up to 1 is expected."
            )
        if mode.rescore and self.objective == "fidelity":
            raise RescoreUnsuitable(
                "This model's answers are its head's own already; "
                "rescore is for layers with learned rows."
            )
        if mode.recall is not None and mode.recall < 1 and self.contract is None:
            raise NoContract(
                "This model has no calibration for recall; "
                "export it again with calibration rows (dss export --calibrate)."
            )
        if not self.can_exact:
            raise NoHead(
                "This model ships no output layer, so it cannot answer exactly; "
                "export it with --head."
            )

    def _plain(self, hidden: NDArray[Any], k: int, experts: int) -> NDArray[np.float32]:
        """Checks shape, k and experts; returns the rows as contiguous float32."""
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
        flags = hidden.flags
        if hidden.dtype is not FLOAT32 or not flags.c_contiguous or not flags.aligned:
            with np.errstate(over="ignore"):
                hidden = np.require(hidden, np.float32, ("C_CONTIGUOUS", "ALIGNED"))
        return hidden


def make_backend(bundle: Bundle, threads: int | None, name: BackendName, cpus: int = 1) -> Backend:
    """By default compiled loops; ONNX Runtime for approximated experts, which only it runs."""
    approximated = any(preview is not None for preview in bundle.previews)
    if name == "onnx" or (name == "auto" and approximated):
        from service.engine.onnx_sessions import OnnxBackend

        return OnnxBackend(bundle, threads or cpus)
    from service.engine.compiled import CompiledBackend

    return CompiledBackend(bundle, threads or 1)
