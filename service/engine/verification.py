"""Verifies that a bundle answers: every graph and every expert, whatever the samples reach."""

import numpy as np
from numpy.typing import NDArray

from service.bundle import Bundle
from service.engine.engine import Engine
from service.engine.graph_comparison import compare_graphs
from service.errors import AnswersNotFinite

ROWS = 8  # that each graph is compared on


def verify_answers(bundle: Bundle, engine: Engine) -> None:
    """Raises a BundleError if a graph is not what its weights say, or an answer is not finite."""
    rows = _rows(bundle)
    compare_graphs(bundle, rows[:ROWS])
    _check_answers(engine, rows)
    if bundle.head is not None:
        _check_answers(Engine(bundle.head), rows[:ROWS])


def _rows(bundle: Bundle) -> NDArray[np.float32]:
    """The samples, or rows made up."""
    if bundle.samples is not None:
        return bundle.samples
    shape = (ROWS, bundle.manifest.hidden_size)
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _check_answers(engine: Engine, rows: NDArray[np.float32]) -> None:
    usual = engine.topk(rows, 1)
    everywhere = engine.topk(rows[:1], engine.n_reachable, engine.n_experts)
    for answer in (usual, everywhere):
        if not np.isfinite(answer.log_probs).all():
            raise AnswersNotFinite("The bundle answers a row with NaN or infinity.")
