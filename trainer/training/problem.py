"""What a method learns a layer from, and what it returns.

M query rows, S sampled and T held-out ones, D hidden, N classes.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from service.bundle import flops_speedup
from service.errors import DSSError
from service.terminal.phases import Phases
from trainer.data.rows import Rows
from trainer.layer import DSSoftmax
from trainer.layer.bias import with_one
from trainer.training import metrics
from trainer.training.answer_gains import Gains, head_gains
from trainer.training.best_epoch import BestEpoch
from trainer.training.checkpoints import Progress
from trainer.training.config import VectorsConfig
from trainer.training.fidelity.teacher import Answers, taught_answers
from trainer.training.head_answers import HeadAnswers, head_answers
from trainer.training.loop import Data, train


class BudgetImpossible(DSSError):
    pass


@dataclass(frozen=True)
class HeldOut:
    """Query rows on which a layer is measured, and from which none learns."""

    hidden: Tensor  # [T,D]
    labels: Tensor  # [T]
    head: Tensor  # [N,D] the full softmax, or [N,D+1] with its biases

    @cached_property
    def full(self) -> HeadAnswers:
        """The full softmax's answers to these rows."""
        return head_answers(self.head, self.hidden, self.labels)

    @property
    def logsumexp(self) -> Tensor:
        """The full softmax's log Z, [T]."""
        matrix = self.head[self.labels]  # [T,D]
        hidden = with_one(self.hidden) if matrix.shape[1] > self.hidden.shape[1] else self.hidden
        return (hidden * matrix).sum(dim=1) - self.full.log_prob

    def figures(self, layer: DSSoftmax) -> dict[str, Any]:
        utilization = metrics.utilization(layer, self.hidden)
        sizes = layer.expert_sizes
        return {
            "accuracy": metrics.accuracy_at(layer, self.hidden, self.labels),
            "mean_rows": float(utilization @ torch.tensor(sizes).double()),
            "flops_speedup": flops_speedup(layer.n_classes, sizes, utilization.tolist()),
        }


@dataclass(frozen=True)
class Problem:
    """What every method learns from."""

    inputs: Rows  # [M,D]
    labels: Tensor  # [M]
    head: Tensor  # [N,D] the full softmax, or [N,D+1] with its biases
    sampled: Tensor  # [S] numbers of some rows ...
    hidden: Tensor  # [S,D] ... and these rows, in memory
    budget: float  # classes scored per answer, on average
    choice: HeldOut  # rows that choices are made on: when to stop, which layer to keep
    report: HeldOut  # rows that only the reported figures come from
    clock: Phases = field(default_factory=Phases)
    kept: dict[str, object] = field(default_factory=dict)  # by a method, from step to step

    @property
    def n_classes(self) -> int:
        return len(self.head)

    @property
    def biased(self) -> bool:
        return self.head.shape[1] > self.hidden.shape[1]

    @cached_property
    def sampled_gains(self) -> Gains:
        """What the full softmax's first classes are worth for the sampled rows: [S,10]."""
        with self.clock.phase("teacher"):
            return head_gains(self.head, self.hidden)

    @cached_property
    def _answers(self) -> dict[int, Answers]:
        return {}

    def answers(self, count: int) -> Answers:
        """The head's first so many answers to the sampled rows."""
        if count not in self._answers:
            with self.clock.phase("teacher"):
                self._answers[count] = taught_answers(self.head, self.hidden, count)
        return self._answers[count]


@dataclass(frozen=True)
class Learned:
    layer: DSSoftmax
    seconds: float
    stages: list[dict[str, Any]] = field(default_factory=list)  # of mitosis: figures of each
    memory: list[dict[str, Any]] = field(default_factory=list)  # while training, if it was pruned
    kept_start: bool = False  # learning made it worse on held-out rows

    @property
    def peak_memory(self) -> float:
        return max(float(point["memory"]) for point in self.memory)


def check_budget(config: VectorsConfig, problem: Problem) -> None:
    """Refuse a budget under which a copy of every class cannot fit, with equal traffic."""
    least = problem.n_classes / config.n_experts
    if config.keep_one and problem.budget < least:
        raise BudgetImpossible(
            f"{config.n_experts} experts with a copy of every class score {least:.1f} classes per"
            f" answer or more; {problem.budget:.1f} were asked for."
        )


def train_stage(
    config: VectorsConfig,
    layer: DSSoftmax,
    data: Data,
    folder: Path,
    *,
    budget: float | None = None,
    best: BestEpoch | None = None,
    resume: bool,
) -> Progress:
    """Train the layer on hidden vectors as they are; the stage has a checkpoint of its own."""
    folder.mkdir(exist_ok=True)
    return train(
        config, nn.Identity(), layer, data, folder, budget=budget, best=best, resume=resume
    )


def memory_curve(layer: DSSoftmax, rows: list[int]) -> list[dict[str, Any]]:
    """What gate and held rows take, in full softmaxes, from the numbers of rows over time."""
    experts, n_classes = layer.n_experts, layer.n_classes
    return [
        {"experts": experts, "rows": held, "memory": (held + experts) / n_classes} for held in rows
    ]
