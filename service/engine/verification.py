"""Verifies that a bundle answers: every graph and every expert, whatever the samples reach."""

import numpy as np
from numpy.typing import NDArray

from service.bundle import Bundle
from service.engine.engine import Engine
from service.engine.graph_comparison import compare_graphs
from service.errors import AnswersNotFinite, GraphDiffers
from service.topk import Mode

EXACT = Mode(exact=True)
ROWS = 8  # that each graph is compared on
ANSWERS = 10
CLASSES_AT_ONCE = 4096  # whose rows are widened to float64


def verify_answers(bundle: Bundle, engine: Engine) -> None:
    """Raises a BundleError if a graph is not what its weights say, or an answer is not finite."""
    rows = _rows(bundle)
    compare_graphs(bundle, rows[:ROWS])
    _check_answers(engine, rows)
    if engine.can_exact:
        _check_exact(bundle, engine, rows[:ROWS])
    elif bundle.head is not None:
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


def _check_exact(bundle: Bundle, engine: Engine, rows: NDArray[np.float32]) -> None:
    """Against all scores in float64."""
    assert bundle.rows is not None  # noqa: S101  can_exact says so
    found = engine.topk(rows, min(ANSWERS, engine.n_classes), mode=EXACT)
    if not np.isfinite(found.log_probs).all():
        raise AnswersNotFinite("The bundle's head answers a row with NaN or infinity.")
    scores = np.concatenate(
        [
            bundle.rows.weights[first : first + CLASSES_AT_ONCE].astype(np.float64) @ rows.T
            for first in range(0, engine.n_classes, CLASSES_AT_ONCE)
        ]
    ).T  # [B,N]
    if bundle.rows.bias is not None:
        scores += bundle.rows.bias
    best = -np.sort(-scores, axis=1)[:, : found.classes.shape[1]]
    if not np.allclose(np.take_along_axis(scores, found.classes, axis=1), best, rtol=1e-9):
        raise GraphDiffers("Exact answers are not those of the head's rows.")
