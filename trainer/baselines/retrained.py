"""The control: the full softmax itself, trained further for as long as the doubly sparse layer is.

What it gains is due to more training and not to sparsity.
"""

import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.baselines import training
from trainer.baselines.method import Baseline, Dial, limit
from trainer.baselines.scan import Scan
from trainer.data.arrays import Head
from trainer.evaluation import onnx_scan
from trainer.training.warm_start import WARM_ROUNDS


class FullRows(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())  # [N,D]

    def rows(self) -> Tensor:
        return self.weight


class FullRetrained(Baseline):
    """The dial is for how many of the epochs."""

    method = "full-retrained"

    @property
    def n_epochs(self) -> int:
        return WARM_ROUNDS * self.inputs.options.retrain_epochs

    def dials(self) -> list[Dial]:
        how = training.drawn(self.inputs.n_classes) | limit(self.inputs.options.retrain_rows)
        return [
            Dial({"epochs": epochs, **how}, f"full softmax, epochs more: {epochs}")
            for epochs in range(1, self.n_epochs + 1)
        ]

    def facts(self) -> dict[str, Any]:
        options = self.inputs.options
        return {
            "rounds": WARM_ROUNDS,
            "epochs": options.retrain_epochs,
            "rows": options.retrain_rows,
            "seed": options.seed,
        }

    @cached_property
    def trained(self) -> Path:
        """The folder with the weights after every epoch."""
        options = self.inputs.options
        folder = self.inputs.folder(self.method, self.facts())
        student = FullRows(torch.from_numpy(self.inputs.head.weight))
        training.fit(
            student,
            training.softmax_loss(student.rows, self.inputs),
            self.inputs,
            folder,
            rounds=WARM_ROUNDS,
            epochs=options.retrain_epochs,
            n_rows=options.retrain_rows,
            keep_epochs=True,
        )
        return folder

    def build(self, dial: Dial) -> Scan:
        student = FullRows(torch.from_numpy(self.inputs.head.weight))
        seconds = training.read_epoch(
            training.epoch_file(self.trained, dial.settings["epochs"]), student
        )
        started = time.perf_counter()
        weight = student.weight.detach().numpy()
        return Scan(
            onnx_scan.full(Head(weight, None)),
            weight.size,
            train_seconds=seconds,
            build_seconds=time.perf_counter() - started,
        )
