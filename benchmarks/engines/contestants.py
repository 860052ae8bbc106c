"""Everybody who answers in the comparison, each at one setting of its dial.

B rows, D hidden, N classes, k answers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.engines.timing import Rows
from service.bundle import Bundle
from service.engine import BackendName, Engine
from service.errors import BackendUnsuitable
from trainer.baselines.ivf import FaissIVF
from trainer.baselines.method import Inputs, Options, Search, best_of
from trainer.baselines.scann_tree import Scann, TreeSearch
from trainer.baselines.svd import SVD
from trainer.data.arrays import Head, Vectors
from trainer.evaluation import onnx_scan

K = 10
BACKENDS: tuple[BackendName, ...] = ("compiled", "onnx")
SEARCHED = (1, 2, 4)
OURS, FULL, APPROXIMATE, PEER = "ours", "full scan", "approximate scan", "peer"

Classes = NDArray[np.integer[Any]]  # [B,k]
Item = TypeVar("Item")


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Contestant:
    name: str
    method: str  # contestants of one method differ in their dials
    kind: str
    dial: Mapping[str, Any]
    one: Callable[[Rows], object]  # called with [1,D], as its user would
    answers: Callable[[Rows], Classes]
    many: Callable[[Rows], object]
    prepare: Callable[[], None] = nothing  # turns the dial; not timed
    build_seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


def some(dials: Sequence[Item], quick: bool) -> Sequence[Item]:
    """All settings, or the first, the middle and the last."""
    if not quick or len(dials) <= 3:
        return dials
    return [dials[0], dials[len(dials) // 2], dials[-1]]


# --- this engine -------------------------------------------------------------------------------


def ours(name: str, bundle: Bundle, facts: Mapping[str, Any]) -> Iterator[Contestant]:
    """A bundle with every backend that serves it, searching 1, 2 and 4 experts."""
    for backend in BACKENDS:
        try:
            engine = Engine(bundle, threads=1, backend=backend)
        except BackendUnsuitable:
            continue
        for searched in SEARCHED:
            if searched <= engine.n_experts:
                yield _ours(name, backend, engine, searched, facts)


def _ours(
    name: str, backend: str, engine: Engine, searched: int, facts: Mapping[str, Any]
) -> Contestant:
    def topk(rows: Rows) -> object:
        return engine.topk(rows, K, searched)

    return Contestant(
        name=f"{name}, {backend}" + (f", {searched} experts" if searched > 1 else ""),
        method=f"{name}, {backend}",
        kind=OURS,
        dial={"experts": searched},
        one=topk,
        many=topk,
        answers=lambda rows: engine.topk(rows, K, searched).classes,
        facts={"bundle": name, "backend": backend, **facts},
    )


# --- scans of all classes ----------------------------------------------------------------------


def full_scans(head: Head, hidden: Rows) -> Iterator[Contestant]:
    yield from exact_scans(head)
    largest = float(np.abs(hidden).max())
    small = onnx_scan.int8(head.weight, largest)
    yield _scan("ONNX Runtime int8", lambda rows: small.topk(rows, K))


def exact_scans(head: Head, k: int = K) -> Iterator[Contestant]:
    scan = onnx_scan.full(head)
    yield _scan("ONNX Runtime fp32", lambda rows: scan.topk(rows, k))
    yield _scan("torch", torch_scan(head, k))
    yield _scan("numpy", lambda rows: best_of(rows @ head.weight.T, None, k))


def torch_scan(head: Head, k: int) -> Callable[[Rows], Classes]:
    weight = torch.from_numpy(head.weight)  # [N,D]

    def topk(rows: Rows) -> Classes:
        logits = torch.nn.functional.linear(torch.from_numpy(rows), weight)  # [B,N]
        return logits.topk(k).indices.numpy()

    return topk


def _scan(name: str, topk: Callable[[Rows], Classes]) -> Contestant:
    return Contestant(name, name, FULL, {}, one=topk, answers=topk, many=topk)


# --- those that `dss compare` has already ------------------------------------------------------


def inputs(head: Head, hidden: Rows) -> Inputs:
    """What these methods are built from: the head alone."""
    labels = np.zeros(len(hidden), np.int64)
    return Inputs(Vectors(hidden, labels), head, Path(), "", Options())


def svd(made_from: Inputs, quick: bool) -> Iterator[Contestant]:
    method = SVD(made_from)
    for dial in some(method.dials(), quick):
        search = method.build(dial)
        yield _search(dial.name, "SVD-softmax", APPROXIMATE, dial.settings, search)


def faiss_ivf(made_from: Inputs, quick: bool) -> Iterator[Contestant]:
    method = FaissIVF(made_from)
    for dial in some(method.dials(), quick):
        name = f"FAISS {dial.name}"
        yield _search(name, "FAISS IVF-Flat", PEER, dial.settings, method.build(dial))


def scann(made_from: Inputs, quick: bool) -> Iterator[Contestant]:
    method = Scann(made_from)
    for dial in some(method.dials(), quick):
        search = method.build(dial)
        yield _search(dial.name, "ScaNN", PEER, dial.settings, search, one=_bare(search))


def _bare(search: TreeSearch) -> Callable[[Rows], object]:
    """One row by the library alone, without making its answer as long as the others'."""
    reordered = max(K, search.reordered)

    def topk(rows: Rows) -> object:
        return search.tree.search(
            rows[0],
            final_num_neighbors=K,
            pre_reorder_num_neighbors=reordered,
            leaves_to_search=search.searched,
        )

    return topk


def _search(
    name: str,
    method: str,
    kind: str,
    dial: Mapping[str, Any],
    search: Search,
    one: Callable[[Rows], object] | None = None,
) -> Contestant:
    def topk(rows: Rows) -> Classes:
        return search.topk(rows, K)

    return Contestant(
        name,
        method,
        kind,
        dict(dial),
        one=one or topk,
        many=topk,
        answers=topk,
        build_seconds=round(search.build_seconds, 3),
    )
