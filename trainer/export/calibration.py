"""Calibrates recall as a contract: which rows an exact scan must answer so that a promise holds.

After a row's first expert was searched, a few features tell how likely it is that some of the
head's best classes are outside. A logistic regression on one part of the held-out rows turns them
into a difficulty; on the other part, thresholds are found by conformal risk control (Angelopoulos
et al. 2022): with rows like these, the expected share of missed classes is at most 1 - recall. To
that is added what chance may do to so many neighbourhoods of rows.

M rows, D hidden, K experts, N classes, k answers, F features.
"""

import warnings
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from service.bundle.contract import Contract
from service.errors import DSSError
from service.terminal import progress
from trainer.data.arrays import chunks
from trainer.layer.bias import logits
from trainer.layer.head_softmax import HeadSoftmax, split_by_expert

LEVELS = (0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9998, 0.9999)
ANSWERS = (1, 5, 10, 50, 100)
ROWS_AT_ONCE = 256
NEIGHBOURHOODS = 64  # of calibrating rows, whose differences say how much is chance
CAUTION = 1.28  # standard errors: nine calibrations of ten then keep what they promise
BLOCKS = 32  # of neighbouring rows, by turns for fitting and for calibrating
LARGEST_FEATURE, LARGEST_GAP = 30.0, 20.0
STRENGTH = 1.0  # of the regression's weights, as scikit-learn's C
LEAST_ROWS = 200
ROUNDING = 1e-9

Floats = NDArray[np.float64]


class TooFewToCalibrate(DSSError):
    pass


class Searched(NamedTuple):
    """What the first expert of each row gave, for some k."""

    features: Floats  # [M,F]
    loss: Floats  # [M] share of the head's k best that are missing
    expert: NDArray[np.int64]  # [M]
    complete: NDArray[np.bool_]  # [M] the expert holds k classes


def calibrate(
    layer: HeadSoftmax, hidden: NDArray[np.floating], levels: tuple[float, ...] = LEVELS
) -> Contract:
    """The contract of a layer, from rows [M,D] that it did not learn from."""
    n_rows = len(hidden)
    if n_rows < LEAST_ROWS:
        raise TooFewToCalibrate(
            f"{n_rows:,} rows are too few to calibrate recall; a promise of"
            f" {words_on_rows(levels)}."
        )
    ks = [k for k in ANSWERS if k <= layer.n_classes]
    block = np.arange(n_rows) * BLOCKS // n_rows
    fitted = block % 2 == 0
    weights, experts, thresholds = [], [], []
    for found in searched(layer, hidden, ks):
        own, of_expert = _fit(found, fitted, layer.n_experts)
        difficulty = found.features @ own + of_expert[found.expert]
        difficulty[~found.complete] = np.inf
        weights.append(own.tolist())
        experts.append(of_expert.tolist())
        rows = difficulty[~fitted], found.loss[~fitted]
        thresholds.append([threshold(*rows, level, NEIGHBOURHOODS) for level in levels])
    return Contract(
        rows=int((~fitted).sum()),
        levels=list(levels),
        ks=ks,
        weights=weights,
        experts=experts,
        thresholds=thresholds,
    )


def threshold(
    difficulty: Floats, loss: Floats, recall: float, neighbourhoods: int = 0
) -> float | None:
    """The largest difficulty [M] up to which rows may stay as they are; None: none may.

    (sum of their losses + 1) / (M + 1) is then at most 1 - recall, with what chance may add where
    rows are given in so many neighbourhoods.
    """
    order = np.argsort(difficulty, kind="stable")
    allowed = (1.0 - recall) * (len(loss) + 1) - 1.0 + ROUNDING
    if allowed < 0.0:
        return None
    missed = np.cumsum(loss[order])
    if neighbourhoods:
        missed += by_chance(order, loss, min(neighbourhoods, len(loss)))
    ranked = difficulty[order]
    over = missed > allowed
    kept = int(over.argmax()) if over.any() else len(ranked)  # rows that may stay
    while 0 < kept < len(ranked) and ranked[kept - 1] == ranked[kept]:
        kept -= 1  # rows of equal difficulty stay together
    if kept == 0:
        return None
    if not np.isfinite(ranked[kept - 1]):
        finite = ranked[np.isfinite(ranked)]
        return float(finite[-1]) if len(finite) else None
    return float(ranked[kept - 1])


def by_chance(order: NDArray[np.int64], loss: Floats, neighbourhoods: int) -> Floats:
    """What other rows of the kind may miss besides [M], for as many of the least difficult rows.

    It is a part of the standard error of the sum, by whole neighbourhoods: rows of one sentence or
    one page are missed together.
    """
    of_row = np.arange(len(loss)) * neighbourhoods // len(loss)
    mean = np.cumsum(loss[order]) / neighbourhoods
    squares = np.zeros(len(loss))
    for number in range(neighbourhoods):
        of_this = np.where(of_row[order] == number, loss[order], 0.0)
        squares += (np.cumsum(of_this) - mean) ** 2
    return CAUTION * np.sqrt(squares * neighbourhoods / max(neighbourhoods - 1, 1))


def rows_needed(recall: float) -> int:
    """Calibration rows without which only an exact scan keeps a promise; half of all held-out."""
    return int(np.ceil(1.0 / (1.0 - recall) - ROUNDING) - 1)


def held_out_needed(recall: float) -> int:
    """Rows for `calibrate`, of which every other block finds the thresholds."""
    in_each = int(np.ceil(2 * rows_needed(recall) / BLOCKS))
    return max(LEAST_ROWS, BLOCKS * in_each)


def words_on_rows(levels: Iterable[float]) -> str:
    return ", ".join(f"{level:g} takes {held_out_needed(level):,}" for level in levels) + " rows"


def too_few_for(contract: Contract) -> list[float]:
    """The levels that no calibration with so few rows could keep but by exact answers."""
    return [level for level in contract.levels if rows_needed(level) > contract.rows]


def _fit(found: Searched, fitted: NDArray[np.bool_], n_experts: int) -> tuple[Floats, Floats]:
    """Weights of the features [F] and of experts [K]; the difficulty is their sum."""
    rows = fitted & found.complete
    missed = found.loss[rows] > 0
    n_features = found.features.shape[1]
    if not missed.any() or missed.all():
        return np.zeros(n_features), np.zeros(n_experts)
    features = found.features[rows]
    scale = np.maximum(features.std(axis=0), 1e-6)
    scale[0] = 1.0  # the constant
    one_hot = np.eye(n_experts)[found.expert[rows]]
    regression = LogisticRegression(C=STRENGTH, fit_intercept=False, max_iter=500)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # then it is only less sharp
        regression.fit(np.hstack([features / scale, one_hot]), missed)
    found_weights = regression.coef_[0]
    return found_weights[:n_features] / scale, found_weights[n_features:]


@torch.no_grad()
def searched(layer: HeadSoftmax, hidden: NDArray[np.floating], ks: list[int]) -> list[Searched]:
    """For each k, features and losses of rows whose first expert alone was searched."""
    classes = split_by_expert(layer)
    parts: list[list[Searched]] = [[] for _ in ks]
    for part in progress.each(list(chunks(len(hidden), ROWS_AT_ONCE)), "calibrating"):
        rows = torch.from_numpy(np.array(hidden[part], np.float32))
        scores = logits(rows, layer.head)  # [b,N]
        ranked = scores.topk(ks[-1], dim=1).indices  # [b,k]
        gates = torch.log_softmax(logits(rows, layer.gate), dim=1)
        best = gates.topk(min(2, layer.n_experts), dim=1)
        first = best.indices[:, 0]
        held = torch.zeros(len(rows), layer.n_classes, dtype=torch.bool)
        for row, expert in enumerate(first.tolist()):
            held[row, classes[expert]] = True
        own = scores.masked_fill(~held, -torch.inf)
        outside = torch.stack(
            [layer.outside(e, rows[i : i + 1])[0] for i, e in enumerate(first.tolist())]
        )
        normaliser = torch.logaddexp(own.logsumexp(dim=1), outside)  # [b]
        top = own.topk(ks[-1], dim=1).values  # [b,k]; -inf where an expert holds fewer
        for place, k in enumerate(ks):
            missing = 1.0 - held.gather(1, ranked[:, :k]).double().mean(dim=1)
            values = features(top, k, normaliser, outside, best.values)
            parts[place].append(
                Searched(
                    values.double().numpy(),
                    missing.numpy(),
                    first.numpy(),
                    top[:, k - 1].isfinite().numpy(),
                )
            )
    return [Searched(*map(np.concatenate, zip(*found, strict=True))) for found in parts]


def features(
    top: Tensor,  # [b,T] the expert's best scores
    k: int,
    normaliser: Tensor,  # [b] estimated log Z
    outside: Tensor,  # [b] its part outside the expert
    gates: Tensor,  # [b,2] or [b,1] log gate values of the first experts
) -> Tensor:
    """[b,F], as the engine computes them."""
    last = top[:, k - 1].clamp_min(-1e30)
    behind = torch.zeros_like(outside)
    if gates.shape[1] > 1:
        behind = (gates[:, 1] - gates[:, 0]).clamp(-LARGEST_GAP, 0.0)
    gap = torch.zeros_like(outside)
    if k > 1:
        gap = (top[:, 0] - top[:, 1]).clamp(0.0, LARGEST_GAP)
    found = torch.stack(
        [
            torch.ones_like(outside),
            outside - normaliser,
            top[:, 0] - normaliser,
            last - normaliser,
            outside - last,
            gates[:, 0],
            behind,
            gap,
        ],
        dim=1,
    )
    return found.clamp(-LARGEST_FEATURE, LARGEST_FEATURE)
