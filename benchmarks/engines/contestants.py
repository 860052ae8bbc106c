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
from trainer.baselines.method import Baseline, Dial, Inputs, Options, Search, best_of
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
    k: int = K  # answers


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


def full_scans(head: Head, hidden: Rows, k: int = K) -> Iterator[Contestant]:
    yield from exact_scans(head, k)
    largest = float(np.abs(hidden).max())
    small = onnx_scan.int8(head.weight, largest)
    yield _scan("ONNX Runtime int8", lambda rows: small.topk(rows, k), k)


def exact_scans(head: Head, k: int = K) -> Iterator[Contestant]:
    scan = onnx_scan.full(head)
    yield _scan("ONNX Runtime fp32", lambda rows: scan.topk(rows, k), k)
    yield _scan("torch", torch_scan(head, k), k)
    yield _scan("numpy", lambda rows: best_of(rows @ head.weight.T, None, k), k)


def torch_scan(head: Head, k: int) -> Callable[[Rows], Classes]:
    weight = torch.from_numpy(head.weight)  # [N,D]

    def topk(rows: Rows) -> Classes:
        logits = torch.nn.functional.linear(torch.from_numpy(rows), weight)  # [B,N]
        return logits.topk(k).indices.numpy()

    return topk


def _scan(name: str, topk: Callable[[Rows], Classes], k: int) -> Contestant:
    return Contestant(name, name, FULL, {}, one=topk, answers=topk, many=topk, k=k)


# --- those that `dss compare` has already ------------------------------------------------------


def inputs(head: Head, hidden: Rows) -> Inputs:
    """What these methods are built from: the head alone."""
    labels = np.zeros(len(hidden), np.int64)
    return Inputs(Vectors(hidden, labels), head, Path(), "", Options())


Dials = Callable[[int], Sequence[Dial]]  # the settings for so many answers
ONE_LENGTH = (K,)  # of answers


def svd(
    made_from: Inputs, quick: bool, ks: Sequence[int] = ONE_LENGTH, dials: Dials | None = None
) -> Iterator[Contestant]:
    method = SVD(made_from)
    for k, dial in _settings(method, quick, ks, dials):
        search = method.build(dial)
        yield searching(dial.name, "SVD-softmax", APPROXIMATE, dial.settings, search, k)


def faiss_ivf(
    made_from: Inputs, quick: bool, ks: Sequence[int] = ONE_LENGTH, dials: Dials | None = None
) -> Iterator[Contestant]:
    method = FaissIVF(made_from)
    for k, dial in _settings(method, quick, ks, dials):
        name = f"FAISS {dial.name}"
        yield searching(name, "FAISS IVF-Flat", PEER, dial.settings, method.build(dial), k)


def scann(
    made_from: Inputs, quick: bool, ks: Sequence[int] = ONE_LENGTH, dials: Dials | None = None
) -> Iterator[Contestant]:
    method = Scann(made_from)
    for k, dial in _settings(method, quick, ks, dials):
        search = method.build(dial)
        one = _bare(search, k)
        yield searching(dial.name, "ScaNN", PEER, dial.settings, search, k, one=one)


def _settings(
    method: Baseline, quick: bool, ks: Sequence[int], dials: Dials | None
) -> Iterator[tuple[int, Dial]]:
    for k in ks:
        for dial in some(method.dials() if dials is None else dials(k), quick):
            yield k, dial


def _bare(search: TreeSearch, k: int) -> Callable[[Rows], object]:
    """One row by the library alone, without making its answer as long as the others'."""
    reordered = max(k, search.reordered)

    def topk(rows: Rows) -> object:
        return search.tree.search(
            rows[0],
            final_num_neighbors=k,
            pre_reorder_num_neighbors=reordered,
            leaves_to_search=search.searched,
        )

    return topk


def searching(
    name: str,
    method: str,
    kind: str,
    dial: Mapping[str, Any],
    search: Search,
    k: int = K,
    one: Callable[[Rows], object] | None = None,
) -> Contestant:
    def topk(rows: Rows) -> Classes:
        return search.topk(rows, k)

    return Contestant(
        name,
        method,
        kind,
        dict(dial),
        one=one or topk,
        many=topk,
        answers=topk,
        build_seconds=round(search.build_seconds, 3),
        k=k,
    )
