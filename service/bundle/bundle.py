"""A bundle in memory: a gate and pruned experts.

N classes, D hidden, K experts, V classes of one expert, R classes of all experts, S samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.bundle import graphs
from service.bundle.head_rows import HeadRows
from service.bundle.manifest import Manifest
from service.bundle.quantisation import RESCORED_AT_LEAST


@dataclass(frozen=True)
class Bundle:
    """A verified bundle in memory."""

    path: Path
    manifest: Manifest
    gate_model: bytes
    expert_models: tuple[bytes | None, ...]  # None: the expert holds no class
    offsets: NDArray[np.int64]  # [K+1]
    classes: NDArray[np.int32]  # [R] expert e holds classes[offsets[e]:offsets[e+1]], ascending
    labels: tuple[str, ...] | None
    samples: NDArray[np.float32] | None  # [S,D]
    previews: tuple[graphs.PreviewSize | None, ...]  # None: the expert scores all its classes
    # Version 1 keeps its matrices in the graphs. Since then they are files, one matrix after the
    # other: [D,V], or [V,D] if candidates' rows are gathered from it.
    weights: NDArray[np.floating[Any]] | None = None  # [R D] float32, or float16
    quantised: NDArray[np.int8] | None = None  # [R D] always [V,D] by [V,D]
    head: "Bundle | None" = None  # the full softmax as a layer of one expert, if it was read
    rows: HeadRows | None = None  # the full softmax's rows, if it was read and has them by row
    rest: NDArray[np.float32] | None = None  # [K,D+1] of a fidelity bundle: see models/FORMAT.md

    @property
    def shared(self) -> HeadRows | None:
        """What the experts of a fidelity bundle gather their rows from."""
        return self.rows if self.manifest.objective == "fidelity" else None

    @property
    def expert_costs(self) -> tuple[float, ...]:
        """`expert_cost` of every expert, for one answer."""
        return tuple(self.expert_cost(expert) for expert in range(self.manifest.n_experts))

    def cost_of(self, expert_rows: NDArray[np.int64], k: int) -> float:
        """The sum of `expert_cost` over the rows [K] that each expert was searched for."""
        searched = np.flatnonzero(expert_rows).tolist()
        return sum(int(expert_rows[e]) * self.expert_cost(e, k) for e in searched)

    def expert_cost(self, expert: int, k: int = 1) -> float:
        """The cost of one row's k answers, in classes scored exactly: D multiply-adds each."""
        size, preview = self.manifest.expert_sizes[expert], self.previews[expert]
        return float(size) if preview is None else preview.cost(size, self.manifest.hidden_size, k)

    def expert_classes(self, expert: int) -> NDArray[np.int32]:
        return self.classes[self.offsets[expert] : self.offsets[expert + 1]]

    def expert_weight(self, expert: int) -> NDArray[np.float32]:
        """An expert's matrix [V,D] in float32, however it is stored."""
        model = self.expert_models[expert]
        if model is None:
            return np.empty((0, self.manifest.hidden_size), np.float32)
        if self.shared is not None:
            return self.shared.weights[self.expert_classes(expert)]
        if self.weights is None:
            return graphs.constants(model)["W"].astype(np.float32)
        matrix = self.external(expert)["W"].astype(np.float32)
        return matrix if self.by_row(expert) else matrix.T

    def by_row(self, expert: int) -> bool:
        return self.quantised is not None or self.previews[expert] is not None

    def gathered(self, expert: int) -> int:
        """The fewest weight rows that are gathered for a query row; 0 if all classes are scored."""
        preview = self.previews[expert]
        if preview is not None:
            return preview.candidates
        return RESCORED_AT_LEAST if self.quantised is not None else 0

    def external(self, expert: int) -> dict[str, NDArray[Any]]:
        """The arrays that an expert's graph keeps outside itself, by name."""
        if self.shared is not None:
            return {"W": self.shared.weights}
        hidden_size = self.manifest.hidden_size
        size = self.manifest.expert_sizes[expert]
        held = slice(self.offsets[expert] * hidden_size, self.offsets[expert + 1] * hidden_size)
        found: dict[str, NDArray[Any]] = {}
        if self.weights is not None:
            rows = (size, hidden_size) if self.by_row(expert) else (hidden_size, size)
            found["W"] = self.weights[held].reshape(rows)
        if self.quantised is not None:
            found["W8"] = self.quantised[held].reshape(size, hidden_size)
        return found


def flops_speedup(n_classes: int, costs: Sequence[float], utilization: Sequence[float]) -> float:
    """The paper's |V| / (sum_k |v_k| u_k + K); what an approximated expert costs is its |v_k|."""
    searched = sum(cost * share for cost, share in zip(costs, utilization, strict=True))
    return n_classes / (searched + len(costs))
