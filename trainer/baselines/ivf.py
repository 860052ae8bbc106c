"""FAISS IVF: the head's rows in clusters, of which the nearest few are scanned.

B rows, D hidden, N classes, k answers.
"""

import time
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.baselines.faiss_index import import_faiss
from trainer.baselines.method import Baseline, Dial, Inputs, Search

LISTS = (64, 256, 1024)
PROBES = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class ListSearch(Search):
    faiss: ModuleType
    index: Any
    probes: int

    def __post_init__(self) -> None:
        self._parameters = self.faiss.SearchParametersIVF(nprobe=self.probes)

    def topk(self, hidden: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        return self.index.search(hidden, k, params=self._parameters)[1]

    def counted(self, hidden: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], float]:
        stats = self.faiss.cvar.indexIVF_stats
        stats.reset()
        found = self.topk(hidden, k)
        # To the middle of every list, then to the rows of those probed.
        return found, float(self.index.nlist * len(hidden) + stats.ndis) * self.index.d


class FaissIVF(Baseline):
    """The dial is how many lists there are, and how many are probed."""

    method = "faiss-ivf"

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self._faiss = import_faiss()
        self._lists = cache(self._build_lists)

    def dials(self) -> list[Dial]:
        return [
            Dial({"lists": lists, "probes": probes}, f"IVF{lists} nprobe {probes}")
            for lists in LISTS
            for probes in PROBES
            if lists <= self.inputs.n_classes and probes <= lists
        ]

    def _build_lists(self, lists: int) -> tuple[Any, float]:
        started = time.perf_counter()
        weight = self.inputs.head.weight
        quantizer = self._faiss.IndexFlatIP(weight.shape[1])
        index = self._faiss.IndexIVFFlat(
            quantizer, weight.shape[1], lists, self._faiss.METRIC_INNER_PRODUCT
        )
        index.cp.min_points_per_centroid = 1  # lists may be small: no warning
        index.cp.seed = self.inputs.options.seed
        index.train(weight)
        index.add(weight)
        return index, time.perf_counter() - started

    def build(self, dial: Dial) -> ListSearch:
        index, seconds = self._lists(dial.settings["lists"])
        return ListSearch(self._faiss, index, dial.settings["probes"], build_seconds=seconds)
