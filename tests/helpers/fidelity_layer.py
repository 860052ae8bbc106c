"""Layers whose experts have the head's own rows, in memory and as bundles, and what they answer.

N classes, D hidden, K experts, B rows.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from service import bundle
from service.bundle import graphs, head_rows
from service.bundle.contract import Contract

Floats = NDArray[np.float32]


def layer(
    head: Floats,  # [N,D]
    experts: Sequence[Sequence[int]],
    *,
    bias: Floats | None = None,
    gate: Floats | None = None,  # [K,D]
    rest: Floats | None = None,  # [K,D+1]
    contract: Contract | None = None,
) -> bundle.Bundle:
    """In memory alone, as if it had been read; it has no graphs but the gate's."""
    n_classes, width = head.shape
    sizes = [len(held) for held in experts]
    quantised, scales = head_rows.quantise(head)
    if gate is None:
        gate = np.random.default_rng(7).normal(size=(len(experts), width)).astype(np.float32)
    return bundle.Bundle(
        path=Path(),
        manifest=bundle.Manifest.model_construct(
            format_version=4,
            precision="int8",
            n_classes=n_classes,
            hidden_size=width,
            n_experts=len(experts),
            expert_sizes=sizes,
            head=True,
            objective="fidelity",
            contract=contract,
        ),
        gate_model=graphs.gate_graph(gate),
        expert_models=(None,) * len(experts),
        offsets=np.cumsum([0, *sizes]),
        classes=np.array([*chain.from_iterable(map(sorted, experts))], np.int32),
        labels=None,
        samples=None,
        previews=(None,) * len(experts),
        rows=head_rows.measured("head", head, quantised, scales, bias),
        rest=np.zeros((len(experts), width + 1), np.float32) if rest is None else rest,
    )


def some_experts(n_classes: int, n_experts: int, seed: int = 0) -> list[list[int]]:
    """Of different sizes, with classes in several of them and in none."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, max(2, n_classes // 2), n_experts)
    return [sorted(rng.choice(n_classes, size, replace=False).tolist()) for size in sizes]


def write_fidelity(
    path: Path,
    *,
    n_classes: int = 60,
    width: int = 20,
    n_experts: int = 4,
    biased: bool = False,
    contract: Contract | None = None,
    samples: bool = True,
    seed: int = 0,
) -> bundle.Bundle:
    """A bundle on disk; its last expert holds no class."""
    rng = np.random.default_rng(seed)
    experts = [*some_experts(n_classes, n_experts - 1, seed), []]
    return bundle.write(
        path,
        gate=rng.normal(size=(n_experts, width)).astype(np.float32),
        offsets=np.cumsum([0, *map(len, experts)]),
        classes=np.array([*chain.from_iterable(experts)], np.int32),
        n_classes=n_classes,
        training=bundle.TrainingFacts(
            utilization=[1 / n_experts] * n_experts, flops_speedup=2.0, accuracy=0.5
        ),
        samples=rng.normal(size=(3, width)).astype(np.float32) if samples else None,
        head=rng.normal(size=(n_classes, width)).astype(np.float32),
        head_bias=rng.normal(size=n_classes).astype(np.float32) if biased else None,
        objective="fidelity",
        rest=rng.normal(size=(n_experts, width + 1)).astype(np.float32),
        contract=contract,
    )


def a_contract(n_experts: int, *, ks: Sequence[int] = (1, 5), seed: int = 0) -> Contract:
    """Thresholds in the midst of what rows have, and one promise that only a scan keeps."""
    rng = np.random.default_rng(seed)
    return Contract(
        rows=1000,
        levels=[0.5, 0.9, 0.99],
        ks=[*ks],
        weights=rng.normal(size=(len(ks), 8)).tolist(),
        experts=rng.normal(size=(len(ks), n_experts)).tolist(),
        thresholds=[[1.0, 0.0, None] for _ in ks],
    )


# --- by numpy, in float64 ----------------------------------------------------------------------


def all_scores(head: Floats, hidden: Floats, bias: Floats | None = None) -> NDArray[np.float64]:
    """[B,N]; equal rows have equal scores, bit for bit."""
    products = head.astype(np.float64)[None] * hidden.astype(np.float64)[:, None]  # [B,N,D]
    scores: NDArray[np.float64] = products.sum(axis=2)
    return scores if bias is None else scores + bias


def best(scores: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """The k largest of each row, ties by class."""
    return np.stack([np.lexsort((np.arange(len(row)), -row))[:k] for row in scores])


def logsumexp(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    top = scores.max(axis=-1, keepdims=True)
    total: NDArray[np.float64] = top[..., 0] + np.log(np.exp(scores - top).sum(axis=-1))
    return total


def gates(made: bundle.Bundle, hidden: Floats) -> NDArray[np.float64]:
    """[B,K] softmax."""
    logits = hidden.astype(np.float64) @ graphs.constants(made.gate_model)["U"].T
    return np.exp(logits - logsumexp(logits)[:, None])
