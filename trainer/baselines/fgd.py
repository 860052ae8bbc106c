"""FGD (Zhang et al., 2018): greedy search in a graph over the head, made for inner products.

Each row gets one more coordinate, so that all have the same length; then the nearest rows to a
hidden vector are those with the largest logits. The graph is FAISS's HNSW.

The paper gives FGD at a high and at a low precision without the settings: the widest and the
narrowest search of the sparser graph stand for them.

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

LINKS = (16, 32)  # M, of each row
WIDTHS = (16, 32, 64, 128, 256, 512, 1024)  # efSearch
BUILD_WIDTH = 200  # efConstruction
PAPER = {(LINKS[0], WIDTHS[-1]): "FGD-H", (LINKS[0], WIDTHS[0]): "FGD-L"}


@dataclass
class GraphSearch(Search):
    faiss: ModuleType
    index: Any
    width: int

    def __post_init__(self) -> None:
        self._parameters = self.faiss.SearchParametersHNSW(efSearch=self.width)

    def topk(self, hidden: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        rows = np.zeros((len(hidden), hidden.shape[1] + 1), np.float32)
        rows[:, :-1] = hidden
        return self.index.search(rows, k, params=self._parameters)[1]

    def counted(self, hidden: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], float]:
        stats = self.faiss.cvar.hnsw_stats
        stats.reset()
        found = self.topk(hidden, k)
        return found, float(stats.ndis) * self.index.d


def lengthened(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows [N,D] with one more coordinate that makes all of them as long as the longest."""
    squares = np.square(weight, dtype=np.float64).sum(axis=1)
    rest = np.sqrt(np.maximum(squares.max() - squares, 0))
    return np.concatenate([weight, rest[:, None]], axis=1).astype(np.float32)


class FGD(Baseline):
    """The dial is how wide the search is, and how many links a row has."""

    method = "fgd"

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self._faiss = import_faiss()
        self._graph = cache(self._build_graph)

    def dials(self) -> list[Dial]:
        return [
            Dial(
                {"links": links, "width": width},
                f"FGD M={links} ef={width}",
                PAPER.get((links, width)),
            )
            for links in LINKS
            for width in WIDTHS
        ]

    def _build_graph(self, links: int) -> tuple[Any, float]:
        started = time.perf_counter()
        rows = lengthened(self.inputs.head.weight)
        index = self._faiss.IndexHNSWFlat(rows.shape[1], links)
        index.hnsw.efConstruction = BUILD_WIDTH
        index.add(rows)
        return index, time.perf_counter() - started

    def build(self, dial: Dial) -> GraphSearch:
        index, seconds = self._graph(dial.settings["links"])
        return GraphSearch(self._faiss, index, dial.settings["width"], build_seconds=seconds)
