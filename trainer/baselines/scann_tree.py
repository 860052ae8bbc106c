"""ScaNN: a tree of the head's rows, scores from 4-bit codes, the best of them scored exactly.

B rows, D hidden, N classes, k answers.
"""

import importlib
import time
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.baselines.method import Baseline, Dial, Inputs, PackageMissing, Search

LEAVES = 100
SEARCHED = (2, 5, 10, 25, 50, 100)
REORDERED = (30, 100)
DIMENSIONS_PER_CODE, CODES = 2, 16
THRESHOLD = 0.2  # of anisotropic quantisation, as ScaNN's own examples have it
SPILLING = {"soar_lambda": 1.5, "overretrieve_factor": 2.0}  # SOAR as its authors set it
FLAT = 0  # leaves: no tree, the codes of all rows are looked at
COUNTED_ROWS = 50  # of a batch, to learn how many classes lie in the searched leaves


@dataclass
class TreeSearch(Search):
    tree: Any
    n_classes: int
    leaves: int
    searched: int
    reordered: int

    def topk(self, hidden: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        if len(hidden) == 1:
            found, _ = self.tree.search(
                hidden[0],
                final_num_neighbors=k,
                pre_reorder_num_neighbors=max(k, self.reordered),
                leaves_to_search=self.searched,
            )
            answer = np.full((1, k), -1, np.int64)
            answer[0, : len(found)] = found
            return answer
        found, scores = self.tree.search_batched(
            hidden,
            final_num_neighbors=k,
            pre_reorder_num_neighbors=max(k, self.reordered),
            leaves_to_search=self.searched,
        )
        return np.where(np.isnan(scores), -1, found.astype(np.int64))

    def counted(self, hidden: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], float]:
        """ScaNN does not say what it does, so it is asked, for some of the rows, for all that it
        looks at. One look-up and addition counts as one multiply-add."""
        asked = np.unique(np.linspace(0, len(hidden) - 1, COUNTED_ROWS).astype(np.int64))
        seen = [self._seen(hidden[row]) for row in asked]
        hidden_size = hidden.shape[1]
        codes = -(-hidden_size // DIMENSIONS_PER_CODE)
        reordered = np.minimum(seen, self.reordered)
        each = (
            self.leaves * hidden_size  # to every leaf's centre
            + CODES * hidden_size  # the table of what each code adds
            + np.mean(seen) * codes
            + np.mean(reordered) * hidden_size
        )
        return self.topk(hidden, k), float(each) * len(hidden)

    def _seen(self, row: NDArray[np.float32]) -> int:
        found, _ = self.tree.search(
            row,
            final_num_neighbors=self.n_classes,
            pre_reorder_num_neighbors=self.n_classes,
            leaves_to_search=self.searched,
        )
        return len(found)


class Scann(Baseline):
    """The dial is how many leaves are searched and how many rows are scored exactly."""

    method = "scann"

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self._scann = import_scann()
        self._leaves = min(LEAVES, inputs.n_classes // 2)
        self._tree = cache(self._build_tree)

    def dials(self) -> list[Dial]:
        return [
            Dial(
                {"leaves": self._leaves, "searched": searched, "reordered": reordered},
                f"ScaNN {self._leaves}/{searched} reorder {reordered}",
            )
            for searched in SEARCHED
            for reordered in REORDERED
            if searched <= self._leaves
        ]

    def _build_tree(self, leaves: int, spilling: bool) -> tuple[Any, float]:
        started = time.perf_counter()
        weight = self.inputs.head.weight
        builder = self._scann.scann_ops_pybind.builder(weight, 10, "dot_product")
        if leaves != FLAT:
            builder = builder.tree(
                num_leaves=leaves,
                num_leaves_to_search=leaves,
                training_sample_size=len(weight),
                **(SPILLING if spilling else {}),
            )
        built = (
            builder.score_ah(DIMENSIONS_PER_CODE, anisotropic_quantization_threshold=THRESHOLD)
            .reorder(REORDERED[-1])
            .build()
        )
        return built, time.perf_counter() - started

    def build(self, dial: Dial) -> TreeSearch:
        settings = dial.settings
        built, seconds = self._tree(settings["leaves"], settings.get("spilling", False))
        return TreeSearch(
            built,
            self.inputs.n_classes,
            settings["leaves"],
            settings["searched"],
            settings["reordered"],
            build_seconds=seconds,
        )


@cache
def import_scann() -> ModuleType:
    try:
        return importlib.import_module("scann")
    except ImportError as error:
        raise PackageMissing("Install scann for this.") from error
