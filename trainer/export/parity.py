"""Checks that an engine's answers are those of the layer its bundle was made from.

B query rows, D hidden, N classes, k answers.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from service.engine import Engine
from service.errors import ParityFailed
from service.terminal import progress
from trainer.data.arrays import chunks
from trainer.export.svd_softmax import ROWS_AT_ONCE, ApproximatedLayer, Floats
from trainer.layer import DSSoftmax

# On log-probabilities, absolute and relative: a gate with large logits rounds its own value, and
# that scales every score of the row. Classes that close may change places.
TOLERANCE = 1e-4
# An int8 expert scores its best classes exactly, but its normaliser is a sum over all of them.
INT8_TOLERANCE = 0.02
INT8_AGREEMENT = 0.999
HEAD_TOLERANCE = 0.05  # of the normaliser over the head's rows in whole numbers, on average
CHECKED = ((1, 1), (10, 1), (10, 2))  # k and experts searched


def check_parity(layer: DSSoftmax, engine: Engine, hidden: NDArray[np.float32]) -> None:
    """Refuse if the engine's answers differ from the layer's own, at several k and depths."""
    for k, experts, log_probs, best, scores in _beside(layer, engine, hidden):
        differences = np.abs(log_probs - best)
        if not (differences <= tolerated(log_probs)).all():
            raise ParityFailed(
                f"The bundle's log-probabilities differ from the layer's by up to"
                f" {differences.max():.2g} at k={k}, experts={experts}; nothing was exported."
            )
        # Near-ties may change places, but each class must have the score that the engine gives it.
        wrong = ~(np.abs(scores - log_probs) <= tolerated(log_probs))
        if wrong.any():
            raise ParityFailed(
                f"The bundle's classes differ from the layer's in {wrong.any(1).sum()} rows"
                f" at k={k}, experts={experts}; nothing was exported."
            )


def check_agreement(layer: DSSoftmax, engine: Engine, hidden: NDArray[np.float32]) -> None:
    """Refuse int8 experts that answer other classes than the layer in more than a few rows."""
    for k, experts, log_probs, best, scores in _beside(layer, engine, hidden):
        if not (np.abs(scores - log_probs) <= INT8_TOLERANCE * (1 + np.abs(scores))).all():
            raise ParityFailed(
                f"The bundle's log-probabilities differ from the layer's by more than int8 explains"
                f" at k={k}, experts={experts}; nothing was exported."
            )
        # Near-ties may change places.
        agreement = float((np.abs(scores - best) <= tolerated(best)).all(axis=1).mean())
        if agreement < INT8_AGREEMENT:
            raise ParityFailed(
                f"int8 experts answer as the layer does in {agreement:.2%} of the rows at k={k},"
                f" experts={experts}; {INT8_AGREEMENT:.1%} are needed, so nothing was exported."
            )


def check_head_answers(layer: DSSoftmax, engine: Engine, hidden: NDArray[np.float32]) -> None:
    """Refuse if the engine of a layer of the head's own rows names other classes than the layer.

    Its normaliser is a sum of scores in whole numbers, which moves all log-probabilities of a row
    alike: that may be a little, and much less on average.
    """
    for k, experts, log_probs, best, scores in _beside(layer, engine, hidden):
        shift = (log_probs - scores)[:, :1]
        if (np.abs(log_probs - scores - shift) > tolerated(scores)).any() or (
            np.abs(scores - best) > tolerated(best)
        ).any():
            raise ParityFailed(
                f"The bundle's classes differ from the layer's at k={k}, experts={experts}; nothing"
                " was exported."
            )
        mean, most = float(np.abs(shift).mean()), float(np.abs(shift).max())
        if mean > HEAD_TOLERANCE or most > 10 * HEAD_TOLERANCE:
            raise ParityFailed(
                f"The bundle's log-probabilities differ from the layer's by {mean:.2g} on average"
                f" at k={k}, experts={experts}; nothing was exported."
            )


def _beside(
    layer: DSSoftmax, engine: Engine, hidden: NDArray[np.float32]
) -> Iterator[tuple[int, int, Floats, Floats, Floats]]:
    """k, experts searched, and [B,k] log-probabilities: of the engine's answers by the engine, of
    the layer's own best, and of the engine's answers by the layer."""
    inputs = torch.from_numpy(hidden)
    for k, experts in progress.each(CHECKED, "checking answers"):
        k, experts = min(k, engine.n_reachable), min(experts, layer.n_experts)
        expected = layer.searched(inputs, k, experts)  # [B,N]
        answer = engine.topk(hidden, k, experts)
        best = expected.topk(k, dim=1).values.numpy()
        scores = np.take_along_axis(expected.numpy(), answer.classes, axis=1)
        yield k, experts, answer.log_probs, best, scores


def tolerated(log_probs: Floats) -> Floats:
    return TOLERANCE * (1 + np.abs(log_probs))


def check_approximation(
    approximated: ApproximatedLayer, engine: Engine, hidden: NDArray[np.float32]
) -> None:
    """Refuse if the engine's answers are not those of the approximated layer.

    As `check_parity`, except that rounding may decide which class is the last candidate.
    """
    for k, experts in progress.each(CHECKED, "checking answers"):
        k, experts = min(k, engine.n_reachable), min(experts, engine.n_experts)
        answer = engine.topk(hidden, k, experts)
        for part in chunks(len(hidden), ROWS_AT_ONCE):
            low, high = approximated.searched(hidden[part], k, experts)  # [b,N] each
            classes, log_probs = answer.classes[part], answer.log_probs[part]  # [b,k] each
            wrong = ~_between(log_probs, _largest(low, k), _largest(high, k))
            if wrong.any():
                raise ParityFailed(
                    "The bundle's log-probabilities differ from the approximated layer's in"
                    f" {wrong.any(1).sum()} rows at k={k}, experts={experts}; nothing was exported."
                )
            named = (np.take_along_axis(bound, classes, axis=1) for bound in (low, high))
            wrong = ~_between(log_probs, *named)
            if wrong.any():
                raise ParityFailed(
                    "The bundle's classes differ from the approximated layer's in"
                    f" {wrong.any(1).sum()} rows at k={k}, experts={experts}; nothing was exported."
                )


def _largest(values: Floats, k: int) -> Floats:
    return np.sort(values, axis=1)[:, : -k - 1 : -1]  # [b,k] descending


def _between(values: Floats, low: Floats, high: Floats) -> NDArray[np.bool_]:
    tolerance = tolerated(values)
    return (values >= low - tolerance) & (values <= high + tolerance)
