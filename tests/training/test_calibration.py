"""Recall as a contract: thresholds keep their promise on rows like those they were found on."""

import numpy as np
import pytest
import torch

from trainer.export.calibration import (
    TooFewToCalibrate,
    calibrate,
    held_out_needed,
    rows_needed,
    searched,
    threshold,
    too_few_for,
)
from trainer.layer.bias import logits
from trainer.layer.head_softmax import HeadSoftmax, keys_of

INFINITY = float("inf")


def test_a_threshold_worked_by_hand() -> None:
    """Nine rows: at most (1 - recall) (9 + 1) - 1 of loss may stay."""
    difficulty = np.arange(9.0)
    loss = np.array([0, 0, 0, 0, 1, 0, 1, 1, 1.0])
    assert threshold(difficulty, loss, 0.8) == 5.0  # one: up to just before the second loss
    assert threshold(difficulty, loss, 0.9) == 3.0  # none
    assert threshold(difficulty, loss, 0.95) is None  # not even without any loss
    assert threshold(difficulty, loss, 0.5) == 8.0  # all four


def test_rows_of_equal_difficulty_stay_together() -> None:
    difficulty = np.array([0.0, 1.0, 1.0, 1.0])
    assert threshold(difficulty, np.array([0, 0, 1.0, 1.0]), 0.5) == 0.0
    assert threshold(np.zeros(4), np.array([0, 0, 1.0, 1.0]), 0.5) is None


def test_rows_that_are_always_scanned_need_no_threshold() -> None:
    difficulty = np.array([0.0, 1.0, INFINITY, INFINITY])
    assert threshold(difficulty, np.array([0.0, 0.0, 0.0, 0.0]), 0.5) == 1.0
    assert threshold(np.full(4, INFINITY), np.zeros(4), 0.5) is None


@pytest.mark.parametrize("recall", [0.8, 0.9, 0.99])
def test_promises_hold_for_unseen_rows(recall: float) -> None:
    """On average over calibrations: the expected loss is at most 1 - recall."""
    random = np.random.default_rng(7)
    losses = []
    for _ in range(300):
        difficulty = random.normal(size=2 * 400)
        missed = random.random(800) < 1 / (1 + np.exp(2 - difficulty))
        found = threshold(difficulty[:400], missed[:400].astype(float), recall)
        kept = difficulty[400:] <= (-INFINITY if found is None else found)
        losses.append(float((missed[400:] & kept).mean()))
    mean, error = np.mean(losses), np.std(losses) / np.sqrt(len(losses))
    assert mean <= 1 - recall + 3 * error
    assert mean >= 0.3 * (1 - recall)  # and it does not just scan everything


def test_rows_needed() -> None:
    assert rows_needed(0.9) == 9 and rows_needed(0.999) == 999
    loss = np.zeros(999)
    assert threshold(np.arange(999.0), loss, 0.999) is not None
    assert threshold(np.arange(998.0), loss[1:], 0.999) is None


def make_layer() -> HeadSoftmax:
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(60, 8, generator=generator)
    gate = 3 * torch.randn(4, 8, generator=generator)
    hidden = torch.randn(3000, 8, generator=generator)
    expert = logits(hidden, gate).argmax(dim=1)
    wanted = torch.zeros(4, 60)
    for rank in range(10):
        place = logits(hidden, head).topk(10).indices[:, rank]
        wanted.index_put_((expert, place), torch.ones(3000), accumulate=True)
    held = wanted > wanted.quantile(0.4, dim=1, keepdim=True)
    return HeadSoftmax(head, gate, keys_of(held), torch.zeros(4, 9))


def test_a_layer_keeps_what_its_contract_promises() -> None:
    layer = make_layer()
    random = np.random.default_rng(1)
    contract = calibrate(layer, random.normal(size=(8000, 8)).astype(np.float32))
    unseen = random.normal(size=(8000, 8)).astype(np.float32)
    assert contract.rows == 4000 and contract.ks == [1, 5, 10, 50]
    for k, found, weights, experts, thresholds in zip(
        contract.ks, searched(layer, unseen, contract.ks), contract.weights, contract.experts,
        contract.thresholds, strict=True,
    ):  # fmt: skip
        difficulty = found.features @ weights + np.array(experts)[found.expert]
        for recall, limit in zip(contract.levels, thresholds, strict=True):
            if limit is None:
                assert recall > 0.999 or k == 50  # experts hold fewer than 50 classes
                continue
            loss = np.where((difficulty <= limit) & found.complete, found.loss, 0.0)
            assert loss.mean() <= 1 - recall + 3 * loss.std() / np.sqrt(8000) + 1e-4, (k, recall)


def test_too_few_rows_are_refused() -> None:
    words = r"100 rows are too few to calibrate recall; .* 0\.9 takes 200, .*0\.999 takes 2,016,"
    with pytest.raises(TooFewToCalibrate, match=words):
        calibrate(make_layer(), np.zeros((100, 8), np.float32))


def test_rows_that_are_missed_together_are_feared_more() -> None:
    """Pages of 50 rows, of which some are hard as a whole: most calibrations keep the promise."""
    random = np.random.default_rng(3)
    broken = {0: 0, 64: 0}
    for _ in range(100):
        page = np.repeat(random.normal(size=2 * 64), 50)
        difficulty = page + 0.3 * random.normal(size=len(page))
        missed = (random.random(len(page)) < 1 / (1 + np.exp(3 - 2 * page))).astype(float)
        for neighbourhoods in broken:
            limit = threshold(difficulty[:3200], missed[:3200], 0.95, neighbourhoods)
            kept = difficulty[3200:] <= (-INFINITY if limit is None else limit)
            broken[neighbourhoods] += (missed[3200:] * kept).mean() > 0.05
    assert broken[64] <= 25 < broken[0]


@pytest.mark.parametrize("recall", [0.98, 0.99, 0.995])
def test_as_many_rows_as_are_asked_for_are_enough(recall: float) -> None:
    """And with a few less, that promise is for exact answers only."""
    layer, random = make_layer(), np.random.default_rng(1)
    layer.keys = torch.arange(4 * 60)  # experts that hold all classes miss none
    enough = held_out_needed(recall)
    for rows, kept in ((enough, True), (enough - 64, False)):
        if rows < 200:
            continue
        found = calibrate(layer, random.normal(size=(rows, 8)).astype(np.float32), (recall,))
        assert (too_few_for(found) == []) == kept == (found.exact_only == [])
