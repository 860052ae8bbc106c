"""The best epoch on held-out rows is kept, and training that only gets worse is ended."""

from pathlib import Path

import pytest
import torch

from trainer.layer import DSSoftmax
from trainer.training.best_epoch import BestEpoch


def layer(value: float) -> DSSoftmax:
    made = DSSoftmax(2, 3, 2)
    made.gate.data.fill_(value)
    return made.train()


def score(layer: DSSoftmax) -> float:
    assert not layer.training
    return layer.gate[0, 0].item()


def test_the_best_epoch_is_restored(tmp_path: Path) -> None:
    best = BestEpoch(tmp_path, score, resume=False)
    for epoch, value in enumerate([0.5, 0.9, 0.7]):
        measured = layer(value)
        best.measure(measured, epoch)
        assert measured.training
    assert best.best == pytest.approx(0.9)
    last = layer(0.7)
    best.restore(last)
    assert torch.equal(last.gate, torch.full((2, 2), 0.9))


def test_of_equal_epochs_the_first_is_kept(tmp_path: Path) -> None:
    best = BestEpoch(tmp_path, lambda _: 1.0, resume=False)
    for epoch, value in enumerate([0.5, 0.9]):
        best.measure(layer(value), epoch)
    last = layer(0.0)
    best.restore(last)
    assert last.gate[0, 0].item() == 0.5


@pytest.mark.parametrize(
    ("scores", "ended"),
    [
        ([0.5], False),
        ([0.5, 0.4], False),
        ([0.5, 0.4, 0.45], True),
        ([0.5, 0.4, 0.6], False),
        ([0.5, 0.6, 0.5, 0.59], True),
        ([0.5, 0.6, 0.5, 0.6], False),
    ],
)
def test_two_epochs_that_are_worse_end_it(tmp_path: Path, scores: list[float], ended: bool) -> None:
    best = BestEpoch(tmp_path, score, resume=False)
    for epoch, value in enumerate(scores):
        best.measure(layer(value), epoch)
    assert best.passed(len(scores) - 1) is ended


def test_a_resumed_stage_knows_its_epochs(tmp_path: Path) -> None:
    first = BestEpoch(tmp_path, score, resume=False)
    for epoch, value in enumerate([0.5, 0.9, 0.7]):
        first.measure(layer(value), epoch)
    again = BestEpoch(tmp_path, score, resume=True)
    assert again.scores == first.scores
    assert not again.passed(2)
    again.measure(layer(0.7), 2)  # an epoch that is done again
    assert again.passed(3) is False
    again.measure(layer(0.6), 3)
    assert again.passed(3)
    last = layer(0.0)
    again.restore(last)
    assert last.gate[0, 0].item() == pytest.approx(0.9)
    assert BestEpoch(tmp_path, score, resume=False).scores == {}
