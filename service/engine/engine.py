"""Top-k answers from a bundle. Knows arrays; knows no HTTP and no asyncio.

B rows, D hidden, K experts, N classes, k answers, F features.
"""

from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from service.bundle import Bundle
from service.bundle.contract import Contract
from service.engine.backend import Backend, not_finite
from service.engine.kernels.scores import all_finite
from service.errors import (
    EmptyBatch,
    ExpertsOutOfRange,
    KOutOfRange,
    ModeMalformed,
    ModesConflict,
    NoContract,
    NoHead,
    RecallOutOfRange,
    RescoreUnsuitable,
    WrongWidth,
)
from service.topk import RUNGS, SPARSE, Mode, Objective, TopK

if TYPE_CHECKING:
    from service.engine.fidelity import FidelityBackend

BackendName = Literal["auto", "compiled", "onnx"]

FLOAT32 = np.dtype(np.float32)
# Of a layer's answers this many for each answer, and not fewer than CANDIDATES_AT_LEAST, are scored
# again by the head's own rows where that is asked for.
CANDIDATES_PER_ANSWER = 4
CANDIDATES_AT_LEAST = 64
IN_EXPERTS = RUNGS.index("sparse")


class Engine:
    """Answers top-k queries; safe to call from several threads."""

    def __init__(
        self,
        bundle: Bundle,
        threads: int | None = 1,
        backend: BackendName = "auto",
        cpus: int = 1,
    ) -> None:
        """Without a number of threads compiled loops use one, the onnx backend `cpus`."""
        manifest = bundle.manifest
        self.n_classes = manifest.n_classes
        self.hidden_size = manifest.hidden_size
        self.n_experts = manifest.n_experts
        self.expert_sizes = tuple(manifest.expert_sizes)
        self.objective: Objective = manifest.objective
        self.contract: Contract | None = manifest.contract
        self.can_exact = bundle.rows is not None
        self._row_shape = 1, self.hidden_size
        self._faithful = self.objective == "fidelity"
        self.n_reachable = self.n_classes if self._faithful else len(np.unique(bundle.classes))
        self._ships_rows = manifest.rows_folder is not None
        largest_first = np.sort(np.array(self.expert_sizes, np.int64))[::-1]
        # The classes of the g largest experts together.
        self._largest: list[int] = [0, *np.cumsum(largest_first).tolist()]
        self._smallest, self._mean = int(largest_first[-1]), max(1.0, float(largest_first.mean()))
        self._head = _head_backend(bundle, threads or 1)
        self._backend = make_backend(bundle, self._head, threads, backend, cpus)

    def check(self, hidden: NDArray[Any], k: int, experts: int = 1, mode: Mode = SPARSE) -> None:
        """Raise the QueryError that `topk` would."""
        if mode != SPARSE:
            self._exact_backend(experts, mode)
        plain = self._plain(hidden, k, experts, mode)
        if not all_finite(plain):
            raise not_finite(plain)

    def row_scores(self, k: int, experts: int, mode: Mode = SPARSE) -> int:
        """One for each expert in the gate, one for each class that is searched, and one for each
        of the candidates that are merged. Where experts are too small for k classes, further ones
        are searched."""
        if mode.exact or mode.recall == 1:
            return self.n_experts + self.n_classes + k
        if mode.recall is not None:
            return self.row_scores(k, 1) + self.n_classes
        if mode.rescore:
            candidates = self._candidates(k)
            return self.row_scores(candidates, experts) + candidates
        searched = experts if k <= self._smallest else max(experts, 1 + int(k / self._mean))
        searched = min(max(searched, 1), self.n_experts)
        classes = self._largest[searched]
        if self._faithful and (experts == self.n_experts or classes > self.n_classes):
            classes = self.n_classes  # all are scanned instead
        return self.n_experts + classes + searched * k

    def topk(
        self, hidden: NDArray[np.float32], k: int, experts: int = 1, mode: Mode = SPARSE
    ) -> TopK:
        """The k most probable classes of each row, searched in its `experts` best experts, or as
        the mode says."""
        if (
            experts == 1
            and mode is SPARSE
            and hidden.shape == self._row_shape
            and hidden.dtype is FLOAT32
            and 1 <= k <= self.n_reachable
        ):
            found = self._backend.one_row(hidden, k)
            if found is not None:
                return found
        if mode == SPARSE:
            return self._backend.topk(self._plain(hidden, k, experts), k, experts)
        head = self._exact_backend(experts, mode)
        plain = self._plain(hidden, k, experts, mode)
        if mode.rescore:
            return self._rescored(head, plain, k, experts)
        rule = None
        if mode.recall is not None and mode.recall < 1 and self.contract is not None:
            rule = self.contract.rule(k, mode.recall)
        return head.exact(plain, k) if rule is None else head.promised(plain, k, rule)

    def recall_features(
        self, hidden: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.float32], TopK]:
        """What a promise of recall at k goes by, for calibrating one: the features [B,F] of each
        row after its first expert was searched, and that expert's answers.

        A row whose first expert holds fewer than k classes has NaN in place of features and no
        answer: it is always answered exactly.
        """
        head = self._head
        if head is None or not self._faithful:
            raise NoHead("Recall is calibrated for fidelity bundles only.")
        return head.features(self._plain(hidden, k, 1), k)

    def _rescored(
        self, head: "FidelityBackend", hidden: NDArray[np.float32], k: int, experts: int
    ) -> TopK:
        found = self._backend.topk(hidden, self._candidates(k), experts, needed=k)
        classes, log_probs = head.rescored(hidden, k, found)
        searched = np.full(len(hidden), experts, np.int64)
        rungs = np.full(len(hidden), IN_EXPERTS, np.uint8)
        return found._replace(classes=classes, log_probs=log_probs, searched=searched, rungs=rungs)

    def _candidates(self, k: int) -> int:
        return min(max(CANDIDATES_PER_ANSWER * k, CANDIDATES_AT_LEAST), self.n_reachable)

    def _exact_backend(self, experts: int, mode: Mode) -> "FidelityBackend":
        """Checks that the mode can be had."""
        for name, on in (("exact", mode.exact), ("rescore", mode.rescore)):
            if not isinstance(on, bool):
                raise ModeMalformed(f"{name} must be true or false, not {on!r:.40}.")
        if isinstance(mode.recall, bool) or not isinstance(mode.recall, Real | None):
            raise ModeMalformed(f"recall must be a number, not {mode.recall!r:.40}.")
        if mode.exact + mode.rescore + (mode.recall is not None) > 1:
            raise ModesConflict("Only one of exact, recall and rescore may be asked for.")
        if experts != 1 and not mode.rescore:
            raise ModesConflict("exact and recall choose experts themselves; leave experts out.")
        if mode.recall is not None and not 0 < mode.recall <= 1:
            raise RecallOutOfRange(
                f"recall is {mode.recall:g}; a share above 0 and up to 1 is expected."
            )
        if mode.rescore and self._faithful:
            raise RescoreUnsuitable(
                "This model's answers are its head's own already; "
                "rescore is for layers with learned rows."
            )
        if mode.recall is not None and mode.recall < 1 and self.contract is None:
            raise NoContract(
                "This model has no calibration for recall; "
                "export it again with calibration rows (dss export --calibrate)."
                if self._faithful
                else "This model's experts have learned rows, for which no recall can be promised; "
                "ask for exact answers, or train with --objective fidelity."
            )
        if self._head is None and self._ships_rows:
            raise NoHead(
                "This server does not load the model's output layer, so it cannot answer exactly; "
                "start it with repository.load_heads = true."
            )
        if self._head is None:
            raise NoHead(
                "This model ships no output layer, so it cannot answer exactly; "
                "export it with --head."
            )
        return self._head

    def _plain(
        self, hidden: NDArray[Any], k: int, experts: int, mode: Mode = SPARSE
    ) -> NDArray[np.float32]:
        """Checks shape, k and experts; returns the rows as contiguous float32."""
        if hidden.ndim != 2 or hidden.shape[1] != self.hidden_size:
            raise WrongWidth(
                f"Inputs have shape {list(hidden.shape)}; [rows, {self.hidden_size}] is expected."
            )
        if not len(hidden):
            raise EmptyBatch("Inputs hold no row.")
        reachable = self.n_classes if mode.exact or mode.recall is not None else self.n_reachable
        if not 1 <= k <= reachable:
            raise KOutOfRange(f"k is {k}; this model answers k from 1 to {reachable}.")
        if not 1 <= experts <= self.n_experts:
            raise ExpertsOutOfRange(
                f"experts is {experts}; this model searches from 1 to {self.n_experts}."
            )
        flags = hidden.flags
        if hidden.dtype is not FLOAT32 or not flags.c_contiguous or not flags.aligned:
            with np.errstate(over="ignore"):
                hidden = np.require(hidden, np.float32, ("C_CONTIGUOUS", "ALIGNED"))
        return hidden


def _head_backend(bundle: Bundle, threads: int) -> "FidelityBackend | None":
    if bundle.rows is None:
        return None
    from service.engine.fidelity import FidelityBackend

    return FidelityBackend(bundle, bundle.rows, threads)


def make_backend(
    bundle: Bundle,
    head: "FidelityBackend | None",
    threads: int | None,
    name: BackendName,
    cpus: int = 1,
) -> Backend:
    """By default compiled loops; ONNX Runtime for approximated experts, which only it runs."""
    approximated = any(preview is not None for preview in bundle.previews)
    if name == "onnx" or (name == "auto" and approximated):
        if bundle.shared is not None and head is not None:
            from service.engine.shared_sessions import SharedOnnxBackend

            return SharedOnnxBackend(bundle, head, threads or cpus)
        from service.engine.onnx_sessions import OnnxBackend

        return OnnxBackend(bundle, threads or cpus)
    if bundle.shared is not None and head is not None:
        return head
    from service.engine.compiled import CompiledBackend

    return CompiledBackend(bundle, threads or 1)
