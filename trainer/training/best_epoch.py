"""Keeps the layer of the epoch that was best on held-out rows, and ends training that gets worse.

With many weight rows and few query rows a layer soon memorises: it gets better on the rows that it
learns from and worse on all others.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from trainer.data.files import write_json
from trainer.layer import DSSoftmax

LAYER, SCORES = "best.pt", "scores.json"
PATIENCE = 2  # epochs in a row that are worse than the best one before them


class BestEpoch:
    """The best epoch of a stage of training, in the stage's folder; epoch 0 is its beginning."""

    def __init__(self, folder: Path, score: Callable[[DSSoftmax], float], *, resume: bool) -> None:
        self._folder = folder
        self._score = score
        self.scores: dict[int, float] = {}  # by epoch
        if resume and (folder / SCORES).exists():
            known = json.loads((folder / SCORES).read_text())
            self.scores = {int(epoch): score for epoch, score in known.items()}

    @property
    def best(self) -> float:
        return max(self.scores.values())

    def measure(self, layer: DSSoftmax, epoch: int) -> None:
        """Score the layer after an epoch, and keep it if none before was as good."""
        training = layer.training
        score = self._score(layer.eval())
        layer.train(training)
        if all(score > other for other in self.scores.values()):
            save_layer(self._folder / LAYER, layer)
        self.scores[epoch] = score
        write_json(self._folder / SCORES, {str(e): value for e, value in self.scores.items()})

    def passed(self, epoch: int) -> bool:
        """Whether the last epochs up to this one were all worse than the best before them."""
        known = [self.scores[e] for e in range(epoch + 1) if e in self.scores]
        before, recent = known[:-PATIENCE], known[-PATIENCE:]
        return bool(before) and max(recent) < max(before)

    def restore(self, layer: DSSoftmax) -> None:
        """Make the layer what it was after the best epoch."""
        load_layer(self._folder / LAYER, layer)


def save_layer(file: Path, layer: DSSoftmax) -> None:
    temporary = file.with_suffix(".tmp")
    torch.save(layer.state_dict(), temporary)
    temporary.replace(file)


def load_layer(file: Path, layer: DSSoftmax) -> None:
    """The layer may hold other classes before."""
    layer.load_state_dict(torch.load(file, weights_only=True))
