"""Reads the query rows and labels to keep from one batch.

M rows, D hidden.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from service.errors import DSSError
from trainer.capture.batches import Batch, Forward, Labels, LabelsUnclear
from trainer.capture.model import Head
from trainer.capture.stored import stored


class LabelsOutOfRange(DSSError):
    pass


class CountsDiffer(DSSError):
    """There is not one label for each hidden vector."""


class Wanted(NamedTuple):
    """The vectors of a batch that have a label."""

    shape: tuple[int, ...]  # of all labels
    positions: Tensor  # [M] among all of them
    labels: NDArray[np.int64]  # [M]


@dataclass(frozen=True)
class Reader:
    model: nn.Module
    head: Head
    labels: Labels
    forward: Forward
    ignore_index: int
    dtype: np.dtype[Any]

    def wanted(self, batch: Batch, number: int, room: int | None) -> Wanted:
        """The first `room` vectors that have a label. Does not run the model."""
        labels = self.labels(batch)
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
            kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
            raise LabelsUnclear(f"The labels of batch {number} are {kind}; class ids are expected.")
        flat = labels.reshape(-1).cpu().long()
        positions = (flat != self.ignore_index).nonzero()[:room, 0]  # [M]
        kept = flat[positions].numpy()  # [M]
        n_classes = len(self.head.weight)
        wrong = kept[(kept < 0) | (kept >= n_classes)]
        if len(wrong):
            raise LabelsOutOfRange(
                f"Batch {number} has the label {wrong[0]}; {self.head.name} has the classes 0 to"
                f" {n_classes - 1}, and {self.ignore_index} leaves a vector out."
            )
        return Wanted(tuple(labels.shape), positions, kept)

    def vectors(self, batch: Batch, wanted: Wanted, number: int) -> NDArray[Any]:
        """What the head is given for them, as it is stored: [M,D]."""
        self.head.given.clear()
        self.forward(self.model, batch)
        hidden = self.head.take()  # [..., D]
        shape = tuple(hidden.shape[:-1])
        transposed = len(shape) == len(wanted.shape) and shape != wanted.shape
        if transposed or prod(shape) != prod(wanted.shape):
            raise CountsDiffer(
                f"Batch {number} has labels of shape {list(wanted.shape)} for hidden vectors of"
                f" shape {list(shape)}; one for each is expected, in the same order."
            )
        rows = hidden.reshape(-1, hidden.shape[-1])[wanted.positions.to(hidden.device)]
        found: NDArray[np.float32] = rows.float().cpu().numpy()
        return stored(found, self.dtype, number)
