"""What every method of a comparison offers: settings of its dial, and a search for each.

M rows, B rows of a query, D hidden, N classes, k answers.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from service.errors import DSSError
from trainer.data.arrays import Head, Vectors
from trainer.data.rows import MappedRows, sample
from trainer.training.config import VectorsConfig

SAMPLE_ROWS = 200_000  # of training vectors, for what needs no more


class PackageMissing(DSSError):
    """A method's library is not installed; the comparison goes on without the method."""


@dataclass(frozen=True)
class Options:
    """How much is measured and trained."""

    rows: int = 20_000  # of the validation split
    latency: bool = True
    seed: int = 0
    retrain_epochs: int = VectorsConfig().epochs  # of each round of the full softmax's own training
    retrain_rows: int | None = None  # None: all training rows
    train_epochs: int = 2  # of D-softmax and adaptive softmax
    train_rows: int | None = None


@dataclass(frozen=True)
class Inputs:
    """What methods are built from."""

    training: Vectors
    head: Head
    work: Path  # folder for checkpoints
    digest: str  # of training vectors, labels and head
    options: Options

    @property
    def n_classes(self) -> int:
        return self.head.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.head.weight.shape[1]

    def sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Some training vectors [M,D] and their labels [M], always the same ones."""
        rows = sample(len(self.training.labels), SAMPLE_ROWS, self.options.seed)
        labels = torch.from_numpy(self.training.labels[rows.numpy()].astype(np.int64))
        return MappedRows(self.training.hidden)[rows], labels

    def folder(self, method: str, facts: Mapping[str, Any]) -> Path:
        """Where a training of these inputs keeps its checkpoints."""
        return self.work / f"{method}-{key_of(self.digest, facts)}"

    def frequencies(self) -> NDArray[np.int64]:
        """How often each class is a training label, [N]."""
        return np.bincount(self.training.labels, minlength=self.n_classes)


def limit(rows: int | None) -> dict[str, int]:
    """For the record: how many training rows were seen, if not all."""
    return {} if rows is None else {"rows": rows}


@dataclass(frozen=True)
class Dial:
    """One setting of a method."""

    settings: Mapping[str, Any]
    name: str
    paper: str | None = None  # what the paper calls this setting, if it has it


@dataclass
class Search(ABC):
    """A method at one setting, ready to answer.

    The caller sees to it that B x N numbers fit in memory.
    """

    train_seconds: float | None = field(default=None, kw_only=True)
    build_seconds: float = field(default=0.0, kw_only=True)

    # Are the k best the first k of a longer answer?
    nested = True

    @abstractmethod
    def topk(self, hidden: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        """The k best classes of rows [B,D], best first: [B,k]; -1 where fewer were found."""

    @abstractmethod
    def counted(self, hidden: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], float]:
        """The same answer, and how many multiply-adds all of its rows took together."""


class FixedCost(Search):
    """A search that takes the same number of multiply-adds for every row."""

    multiply_adds: float

    def counted(self, hidden: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], float]:
        return self.topk(hidden, k), self.multiply_adds * len(hidden)


class Baseline(ABC):
    """A method with its dial. Work that settings share is done once, when first needed."""

    method: str

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs

    @abstractmethod
    def dials(self) -> Sequence[Dial]:
        """Every setting to measure; cheap."""

    @abstractmethod
    def build(self, dial: Dial) -> Search: ...

    def facts(self) -> dict[str, Any]:
        """What else, besides inputs and dial, its results depend on."""
        return {}


def key_of(*parts: object) -> str:
    """A short name for what the parts say, the same for the same parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def best_of(
    scores: NDArray[np.float32], classes: NDArray[np.int64] | None, k: int
) -> NDArray[np.int64]:
    """The classes of the k largest scores [B,C], best first: [B,k].

    `classes` [B,C] or [C] names each column; None if a column is its own class.
    """
    width = scores.shape[1]
    if width > k:
        found = np.argpartition(scores, width - k, axis=1)[:, width - k :]
        found.sort(axis=1)
    else:
        found = np.broadcast_to(np.arange(width), scores.shape)
    order = np.argsort(-np.take_along_axis(scores, found, axis=1), axis=1, kind="stable")
    found = np.take_along_axis(found, order, axis=1)
    if classes is None:
        return found
    return classes[found] if classes.ndim == 1 else np.take_along_axis(classes, found, axis=1)
