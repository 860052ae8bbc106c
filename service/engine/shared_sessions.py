"""The backend that runs the graphs of a fidelity bundle in ONNX Runtime sessions.

Its experts score their classes in float32; where all classes are to be scanned, and for proven
answers, the compiled loops do so.

B rows, b rows of a part, D hidden, K experts, N classes, k answers, g experts searched.
"""

from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from service.bundle import Bundle
from service.engine.backend import Backend, not_finite
from service.engine.fidelity import FidelityBackend
from service.engine.kernels.scores import all_finite
from service.engine.onnx_sessions import (
    Candidates,
    Work,
    best_of_each,
    groups_of,
    order_ties,
    session,
    side_by_side,
)
from service.topk import NO_CLASS, TopK


class SharedOnnxBackend(Backend):
    def __init__(self, bundle: Bundle, head: FidelityBackend, threads: int = 1) -> None:
        assert bundle.rest is not None  # noqa: S101  of a fidelity bundle
        self._head = head
        self._n_experts, self._n_classes = bundle.manifest.n_experts, bundle.manifest.n_classes
        self._sizes = np.array(bundle.manifest.expert_sizes, np.int64)
        self._rest = bundle.rest.astype(np.float64)  # [K,D+1]
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
        del needed  # k are always found
        if not all_finite(hidden):
            raise not_finite(hidden)
        ranks = experts if k <= self._sizes.min() else self._n_experts
        started = perf_counter()
        ranked, gates = self._gate.run(None, {"hidden": hidden, "g": np.array([ranks])})  # [B,g]
        gate_seconds = perf_counter() - started

        found = Found(len(hidden), k)
        work = Work(self._n_experts)
        scored = np.cumsum(self._sizes[ranked], axis=1)  # [B,g] classes
        few = (scored[:, experts - 1] < self._n_classes) & (experts < self._n_experts)
        for rank in range(ranks):
            short = found.classes[:, -1] == NO_CLASS
            more = short & (scored[:, rank] < self._n_classes)
            rows = np.flatnonzero(few & (more if rank >= experts else True))
            self._search(hidden, ranked[:, rank], rows, found, work)
        log_probs = (found.scores - found.normalisers[:, None]).astype(np.float32)
        order_ties(found.classes, log_probs)
        all_classes = np.flatnonzero(~few | (found.classes[:, -1] == NO_CLASS))
        if len(all_classes):
            exact = self._head.exact(hidden[all_classes], k)
            found.classes[all_classes], log_probs[all_classes] = exact.classes, exact.log_probs
        return TopK(
            found.classes,
            log_probs,
            ranked[:, 0],
            gates[:, 0],
            gate_seconds,
            work.rows,
            work.seconds,
        )

    def _search(
        self,
        hidden: NDArray[np.float32],
        experts: NDArray[np.int64],  # [B]
        rows: NDArray[np.int64],  # for which to search them
        found: "Found",
        work: Work,
    ) -> None:
        k = found.classes.shape[1]
        if not len(rows):
            return
        for expert, places in groups_of(experts[rows]):
            graph, part = self._experts[expert], rows[places]
            if graph is None:
                continue
            held = min(k, int(self._sizes[expert]))
            feeds = {
                "hidden": hidden[part],
                "gate": np.ones((len(part), 1), np.float32),
                "k": np.array([held]),
            }
            started = perf_counter()
            score, position, logsumexp = graph.run(None, feeds)  # [b,held], [b,held], [b,1]
            work.seconds[expert] += perf_counter() - started
            work.rows[expert] += len(part)
            rest = hidden[part] @ self._rest[expert, :-1] + self._rest[expert, -1]  # [b]
            normalisers = logsumexp[:, 0].astype(np.float64)
            found.add(part, (self._classes[expert][position], score), normalisers, rest)


class Found:
    """The best of each row so far, by score, and the normaliser of the expert that holds most."""

    def __init__(self, n: int, k: int) -> None:
        self.classes = np.full((n, k), NO_CLASS, np.int64)
        self.scores = np.full((n, k), -np.inf, np.float32)
        self.normalisers = np.zeros(n)
        self._largest = np.full(n, -np.inf)  # logsumexp of the classes of an expert

    def add(
        self,
        rows: NDArray[np.int64],  # [b]
        more: Candidates,  # [b,held]
        normalisers: NDArray[np.float64],  # [b]
        rest: NDArray[np.float64],  # [b] how much of them the other classes are, as a logarithm
    ) -> None:
        k = self.classes.shape[1]
        both = side_by_side([(self.classes[rows], self.scores[rows]), more])
        self.classes[rows], self.scores[rows] = best_of_each(*both, k)
        share = -np.expm1(np.minimum(rest - normalisers, 0))  # of the expert's own classes
        with np.errstate(divide="ignore"):
            own = normalisers + np.log(share)
        better = (own > self._largest[rows]) | (self._largest[rows] == -np.inf)
        self.normalisers[rows[better]] = normalisers[better]
        self._largest[rows[better]] = own[better]
