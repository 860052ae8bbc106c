"""The log-probabilities that a bundle gives to labels, as its engine normalises them.

By each row's first expert, and relative to its first answer, whose log-probability the engine
says: a label has that much less as its score is lower. Of a head's own rows (the objective
fidelity) a label has its own score also where the expert does not hold it, and the next expert
stands in for one without classes; with learned rows such a label scores 0, as in the layer.

B query rows, D hidden, V classes of one expert, N classes.
"""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from service.bundle import Bundle, graphs
from service.topk import TopK

Floats = NDArray[np.float32]


class LabelLogProbs:
    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    @property
    def known(self) -> bool:
        """Experts approximated by SVD score a label now in one way, now in another."""
        return not any(preview is not None for preview in self._bundle.previews)

    def of(self, hidden: Floats, labels: NDArray[np.int64], first: TopK) -> NDArray[np.float64]:
        """[B], from rows [B,D], labels [B], and the top 1 of each row's first expert."""
        if self._bundle.shared is not None:
            return self._of_shared(hidden, labels, first)
        found = np.empty(len(hidden))
        for expert in np.unique(first.experts):
            rows = np.flatnonzero(first.experts == expert)
            found[rows] = self._of_expert(expert, hidden[rows], labels[rows], first, rows)
        return found

    def _of_shared(
        self, hidden: Floats, labels: NDArray[np.int64], first: TopK
    ) -> NDArray[np.float64]:
        head = self._bundle.shared
        assert head is not None  # noqa: S101
        bias = np.zeros(len(head.weights), np.float32) if head.bias is None else head.bias
        found = first.log_probs[:, 0].astype(np.float64)
        for sign, classes in ((1, labels), (-1, first.classes[:, 0])):
            found += sign * (_products(hidden, head.weights[classes]) + bias[classes])
        return found

    def _of_expert(
        self,
        expert: int,
        hidden: Floats,  # [b,D]
        labels: NDArray[np.int64],  # [b]
        first: TopK,  # of all rows
        rows: NDArray[np.int64],  # [b]
    ) -> NDArray[np.float64]:
        classes = self._bundle.expert_classes(expert)  # [V]
        if not len(classes):  # all classes score 0, and the engine's answer is another expert's
            return np.full(len(rows), -np.log(self._bundle.manifest.n_classes))
        weight, bias = self._matrices[expert]
        found = first.log_probs[rows, 0].astype(np.float64)
        for sign, asked in ((1, labels), (-1, first.classes[rows, 0])):
            place = np.minimum(np.searchsorted(classes, asked), len(classes) - 1)
            score = first.gates[rows] * (_products(hidden, weight[place]) + bias[place])
            found += sign * np.where(classes[place] == asked, score, 0.0)
        return found

    @cached_property
    def _matrices(self) -> list[tuple[Floats, Floats]]:
        """Of each expert rows [V,D] and biases [V]."""
        found = []
        for expert, model in enumerate(self._bundle.expert_models):
            weight = self._bundle.expert_weight(expert)
            bias = None if model is None else graphs.constants(model).get("bias")
            found.append((weight, np.zeros(len(weight), np.float32) if bias is None else bias))
        return found


def _products(hidden: Floats, rows: Floats) -> NDArray[np.float64]:
    """Of each hidden vector [B,D] with its row [B,D]."""
    found: NDArray[np.float64] = np.einsum("bd,bd->b", hidden, rows, dtype=np.float64)
    return found
