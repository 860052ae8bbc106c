"""Graph indexes over the head's rows, by inner product: FAISS HNSW, hnswlib and usearch.

The same links for each row and the same widths of the search for all three. N classes, D hidden.
"""

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from types import ModuleType

import numpy as np

from benchmarks.engines.contestants import ONE_LENGTH, PEER, Classes, Contestant, some
from benchmarks.engines.timing import Rows
from trainer.baselines.faiss_index import import_faiss
from trainer.baselines.method import PackageMissing
from trainer.data.arrays import Head

LINKS = (16, 32)
WIDTHS = (10, 16, 32, 64, 128, 256, 512, 1024)
BUILD_WIDTH = 200


class Graph(ABC):
    """Built for a head; the dial is how wide the search is."""

    library: str

    @abstractmethod
    def __init__(self, head: Head, links: int) -> None: ...

    @abstractmethod
    def turn(self, width: int) -> None: ...

    @abstractmethod
    def search(self, rows: Rows, k: int) -> object:
        """What its user would call."""

    @abstractmethod
    def classes(self, rows: Rows, k: int) -> Classes: ...


class FaissGraph(Graph):
    library = "FAISS HNSW"

    def __init__(self, head: Head, links: int) -> None:
        faiss = import_faiss()
        hidden_size = head.weight.shape[1]
        self._index = faiss.IndexHNSWFlat(hidden_size, links, faiss.METRIC_INNER_PRODUCT)
        self._index.hnsw.efConstruction = BUILD_WIDTH
        self._index.add(head.weight)

    def turn(self, width: int) -> None:
        self._index.hnsw.efSearch = width

    def search(self, rows: Rows, k: int) -> object:
        return self._index.search(rows, k)

    def classes(self, rows: Rows, k: int) -> Classes:
        return self._index.search(rows, k)[1]


class HnswlibGraph(Graph):
    library = "hnswlib"

    def __init__(self, head: Head, links: int) -> None:
        library = imported("hnswlib", "hnswlib")
        n_classes, hidden_size = head.weight.shape
        self._index = library.Index(space="ip", dim=hidden_size)
        self._index.init_index(n_classes, M=links, ef_construction=BUILD_WIDTH, random_seed=0)
        self._index.add_items(head.weight, num_threads=1)

    def turn(self, width: int) -> None:
        self._index.set_ef(width)

    def search(self, rows: Rows, k: int) -> object:
        return self._index.knn_query(rows, k, num_threads=1)

    def classes(self, rows: Rows, k: int) -> Classes:
        return self._index.knn_query(rows, k, num_threads=1)[0].astype(np.int64)


class UsearchGraph(Graph):
    library = "usearch"

    def __init__(self, head: Head, links: int) -> None:
        library = imported("usearch.index", "usearch")
        n_classes, hidden_size = head.weight.shape
        self._index = library.Index(
            ndim=hidden_size,
            metric="ip",
            dtype="f32",
            connectivity=links,
            expansion_add=BUILD_WIDTH,
        )
        self._index.add(np.arange(n_classes), head.weight, threads=1)

    def turn(self, width: int) -> None:
        self._index.expansion_search = width

    def search(self, rows: Rows, k: int) -> object:
        # One vector is asked for as such: its answer is made more cheaply than a batch's.
        return self._index.search(rows[0] if len(rows) == 1 else rows, k, threads=1)

    def classes(self, rows: Rows, k: int) -> Classes:
        found = self._index.search(rows, k, threads=1)
        keys = np.asarray(found.keys).reshape(len(rows), -1).astype(np.int64)
        counts = np.reshape(getattr(found, "counts", k), (-1, 1))  # one row has no counts
        return np.where(np.arange(keys.shape[1]) < counts, keys, -1)


GRAPHS: tuple[type[Graph], ...] = (FaissGraph, HnswlibGraph, UsearchGraph)


def imported(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PackageMissing(f"Install {package} for this.") from error


def graphs(
    kind: type[Graph],
    head: Head,
    quick: bool,
    ks: Sequence[int] = ONE_LENGTH,
    widths: Sequence[int] = WIDTHS,
) -> Iterator[Contestant]:
    for links in LINKS[:1] if quick else LINKS:
        started = time.perf_counter()
        graph = kind(head, links)
        seconds = round(time.perf_counter() - started, 3)
        for k in ks:
            for width in some([width for width in widths if width >= k], quick):
                yield _contestant(graph, links, width, seconds, k)


def _contestant(graph: Graph, links: int, width: int, build_seconds: float, k: int) -> Contestant:
    return Contestant(
        name=f"{graph.library} M={links} ef={width}",
        method=graph.library,
        kind=PEER,
        dial={"links": links, "width": width},
        one=partial(graph.search, k=k),
        many=partial(graph.search, k=k),
        answers=partial(graph.classes, k=k),
        prepare=lambda: graph.turn(width),
        build_seconds=build_seconds,
        k=k,
    )
