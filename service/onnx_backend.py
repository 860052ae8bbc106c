"""A bundle's graphs as they are, each in an ONNX Runtime session. B rows, D hidden, k answers."""

from collections.abc import Iterator
from time import perf_counter

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from service.backend import NO_CLASS, Backend, ExpertRun
from service.bundle import Bundle

GATHERED_AT_ONCE = 2**22  # numbers of candidates' rows that an approximated expert gathers: 16 MB


class OnnxBackend(Backend):
    def __init__(self, bundle: Bundle, threads: int = 1) -> None:
        self._hidden_size = bundle.manifest.hidden_size
        self._sizes = bundle.manifest.expert_sizes
        self._previews = bundle.previews
        self._classes = [
            bundle.expert_classes(expert).astype(np.int64)
            for expert in range(bundle.manifest.n_experts)
        ]
        options = _session_options(threads)
        self._gate = _session(bundle.gate_model, options)
        self._experts = [
            None if model is None else _session(model, options) for model in bundle.expert_models
        ]

    def rank(
        self, hidden: NDArray[np.float32], ranks: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        ranked, gates = self._gate.run(None, {"hidden": hidden, "g": np.array([ranks])})
        return ranked, gates

    def search(
        self,
        hidden: NDArray[np.float32],
        experts: NDArray[np.int64],
        temperatures: NDArray[np.float32],
        distrust: NDArray[np.float32],
        k: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], list[ExpertRun]]:
        classes = np.full((len(hidden), k), NO_CLASS, np.int64)
        log_probs = np.full((len(hidden), k), -np.inf, np.float32)
        runs = []
        for expert, group in _groups(experts):
            session = self._experts[expert]
            if session is None:
                continue
            held = min(k, self._sizes[expert])
            for part in self._parts(expert, held, group):
                gate = temperatures[part, None]  # [b,1]
                started = perf_counter()
                score, position, logsumexp = session.run(
                    None, {"hidden": hidden[part], "gate": gate, "k": np.array([held])}
                )  # [b,held], [b,held], [b,1]
                runs.append(ExpertRun(expert, len(part), perf_counter() - started))
                classes[part, :held] = self._classes[expert][position]
                log_probs[part, :held] = score - logsumexp + distrust[part, None]
        _order_ties(classes, log_probs)
        return classes, log_probs, runs

    def _parts(self, expert: int, k: int, group: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """The rows that an expert takes together: all, unless it gathers candidates for each."""
        preview, rows = self._previews[expert], len(group)
        if preview is not None:
            gathered = max(k, preview.candidates) * self._hidden_size
            rows = max(1, GATHERED_AT_ONCE // gathered)
        for first in range(0, len(group), rows):
            yield group[first : first + rows]


def _order_ties(classes: NDArray[np.int64], log_probs: NDArray[np.float32]) -> None:
    """Scores are in order already, but rounding may have made ties, which go by class id."""
    tied = log_probs[:, 1:] == log_probs[:, :-1]
    wrong = (tied & (classes[:, 1:] < classes[:, :-1]) & (classes[:, 1:] != NO_CLASS)).any(axis=1)
    if wrong.any():
        order = np.lexsort((classes[wrong], -log_probs[wrong]), axis=1)
        classes[wrong] = np.take_along_axis(classes[wrong], order, axis=1)


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
