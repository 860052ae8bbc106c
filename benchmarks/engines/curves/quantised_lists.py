"""FAISS' inverted lists of short codes: the best by codes are ranked by the rows themselves.

Product quantisation of four bits (FastScan), and RaBitQ where the installed FAISS has it.

B rows, D hidden, k answers.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.engines.contestants import PEER, Contestant, Dials, searching, some
from benchmarks.engines.timing import Rows
from trainer.baselines.faiss_index import import_faiss
from trainer.baselines.method import PackageMissing, Search
from trainer.data.arrays import Head

RESIDUAL_CODES = "PQ{}x4fsr"  # two numbers in a code of four bits, of what the list's centre leaves
RABITQ = ("RaBitQfs", "RaBitQ")  # the first that the library knows


@dataclass
class CodeSearch(Search):
    faiss: ModuleType
    index: Any
    probes: int
    reordered: int

    def __post_init__(self) -> None:
        self._lists = self.faiss.SearchParametersIVF(nprobe=self.probes)

    def topk(self, hidden: Rows, k: int) -> NDArray[np.int64]:
        return self.index.search(hidden, k, params=self.parameters(k))[1]

    def parameters(self, k: int) -> Any:  # noqa: ANN401
        factor = max(1.0, self.reordered / k)
        return self.faiss.IndexRefineSearchParameters(
            k_factor=factor, base_index_params=self._lists
        )

    def counted(self, hidden: Rows, k: int) -> tuple[NDArray[np.int64], float]:
        """Its multiply-adds are not comparable with others': what counts here is time."""
        return self.topk(hidden, k), float("nan")


def product_codes(head: Head, quick: bool, ks: Sequence[int], dials: Dials) -> Iterator[Contestant]:
    codes = RESIDUAL_CODES.format(head.weight.shape[1] // 2)
    return _contestants("FAISS IVF-PQ FastScan", lambda _: codes, head, quick, ks, dials)


def rabitq(head: Head, quick: bool, ks: Sequence[int], dials: Dials) -> Iterator[Contestant]:
    return _contestants("FAISS IVF-RaBitQ", _known_rabitq, head, quick, ks, dials)


def _known_rabitq(faiss: ModuleType) -> str:
    for codes in RABITQ:
        try:
            faiss.index_factory(8, f"IVF1,{codes}", faiss.METRIC_INNER_PRODUCT)
        except RuntimeError:
            continue
        return codes
    raise PackageMissing("The installed faiss-cpu has no RaBitQ; install faiss-cpu>=1.11.")


def _contestants(
    method: str,
    codes_of: Callable[[ModuleType], str],
    head: Head,
    quick: bool,
    ks: Sequence[int],
    dials: Dials,
) -> Iterator[Contestant]:
    faiss = import_faiss()
    codes = codes_of(faiss)
    built: dict[int, tuple[Any, float]] = {}
    for k in ks:
        for dial in some(dials(k), quick):
            lists = dial.settings["lists"]
            if lists not in built:
                built[lists] = _build(faiss, head, lists, codes)
            index, seconds = built[lists]
            search = CodeSearch(
                faiss,
                index,
                dial.settings["probes"],
                dial.settings["reordered"],
                build_seconds=seconds,
            )
            # What depends on k alone is made before the call, as a user would.
            search_one = _one(search, k)
            name = f"{method} {dial.name}"
            yield searching(name, method, PEER, dial.settings, search, k, one=search_one)


def _one(search: CodeSearch, k: int) -> Callable[[Rows], object]:
    parameters = search.parameters(k)
    return lambda rows: search.index.search(rows, k, params=parameters)


def _build(faiss: ModuleType, head: Head, lists: int, codes: str) -> tuple[Any, float]:
    started = time.perf_counter()
    width = head.weight.shape[1]
    base = faiss.index_factory(width, f"IVF{lists},{codes}", faiss.METRIC_INNER_PRODUCT)
    base.cp.min_points_per_centroid = 1  # lists may be small: no warning
    index = faiss.IndexRefineFlat(base)
    index.train(head.weight)
    index.add(head.weight)
    return index, time.perf_counter() - started
