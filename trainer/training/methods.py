"""The ways to learn a layer from hidden vectors: warm start, mitosis, dense.

S sampled rows, M rows, D hidden, K experts, N classes, R kept rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.layer import DSSoftmax
from trainer.training import mitosis, warm_start
from trainer.training.config import VectorsConfig
from trainer.training.loop import Data, Progress, Rows, train

WARM_ROUNDS = 2


@dataclass(frozen=True)
class Problem:
    """What a method learns from."""

    inputs: Rows  # [M,D]
    labels: Tensor  # [M]
    head: Tensor  # [N,D] the full softmax
    sampled: Tensor  # [S] numbers of some rows ...
    hidden: Tensor  # [S,D] ... and these rows, in memory
    budget: float  # classes scored per answer, on average
    folder: Path
    resume: bool
    # Called once it is known that the budget can be met, before anything is written.
    begin: Callable[[], None]
    normalisers: Callable[[], Tensor]  # [M] of the full softmax: costly, so asked for when needed
    tested: Callable[[DSSoftmax], dict[str, Any]]  # figures of a layer on held-out rows

    @property
    def n_classes(self) -> int:
        return len(self.head)

    def data(self, config: VectorsConfig) -> Data:
        if not config.distil:
            return Data(self.inputs, self.labels)
        return Data(self.inputs, self.labels, head=self.head, logsumexp=self.normalisers())

    def sampled_data(self, whole: Data) -> Data:
        """The sample alone, in memory: for stages that need not see every row."""
        of_sample = None if whole.logsumexp is None else whole.logsumexp[self.sampled]
        return replace(
            whole, inputs=self.hidden, labels=self.labels[self.sampled], logsumexp=of_sample
        )

    def learn(
        self,
        config: VectorsConfig,
        layer: DSSoftmax,
        name: str,
        data: Data,
        budget: float | None = None,
    ) -> Progress:
        """One resumable stretch of training, in a subfolder of its own."""
        subfolder = self.folder / name
        subfolder.mkdir(exist_ok=True)
        return train(
            config, nn.Identity(), layer, data, subfolder, budget=budget, resume=self.resume
        )


@dataclass(frozen=True)
class Learned:
    layer: DSSoftmax
    seconds: float
    stages: list[dict[str, Any]]  # of mitosis: figures at the end of each
    memory: list[dict[str, Any]]  # held rows in full softmaxes, while training went on

    @property
    def peak_memory(self) -> float:
        return max(float(point["memory"]) for point in self.memory)


def learn_warm(config: VectorsConfig, problem: Problem) -> Learned:
    """Clusters first; then gate and rows learn together; then, for where rows go now, classes are
    chosen anew and their rows learn with the gate held fixed, so that the budget holds."""
    gate = warm_start.cluster_gate(problem.hidden, config.n_experts, config.seed)
    layer, seconds = None, 0.0
    for number in range(1, WARM_ROUNDS + 1):
        wanted = warm_start.demand(
            gate, problem.hidden, problem.head, problem.inputs, problem.labels
        )
        held = warm_start.select(wanted, problem.budget, keep_one=config.keep_one)
        layer = warm_start.make_layer(gate, held, problem.head, before=layer)
        layer.gate.requires_grad_(number < WARM_ROUNDS)
        if number == 1:
            problem.begin()
            data = problem.data(config)
        torch.manual_seed(config.seed + number)
        seconds += problem.learn(config, layer, f"round-{number}", data).seconds
        gate = layer.gate.detach()
    return Learned(layer, seconds, [], [])


def learn_dense(config: VectorsConfig, problem: Problem) -> Learned:
    """Algorithm 1: every expert begins as the full softmax and is pruned."""
    check_budget(config, problem)
    problem.begin()
    torch.manual_seed(config.seed)
    gate = warm_start.sharpened(
        problem.hidden, torch.randn(config.n_experts, problem.head.shape[1])
    )
    everything = torch.ones(config.n_experts, problem.n_classes, dtype=torch.bool)
    layer = warm_start.make_layer(gate, everything, problem.head, before=None)
    begun = len(layer.keys)
    progress = problem.learn(config, layer, "dense", problem.data(config), budget=problem.budget)
    return Learned(layer, progress.seconds, [], memory_curve(layer, [begun, *progress.rows]))


def learn_mitosis(config: VectorsConfig, problem: Problem) -> Learned:
    """Algorithm 2: from 2 experts to K by doubling."""
    check_budget(config, problem)
    problem.begin()
    data = problem.data(config)
    sampled = problem.sampled_data(data)
    layer, seconds = mitosis.one_expert(problem.head), 0.0
    stage = replace(config, epochs=config.stage_epochs)
    figures: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    for n_experts in mitosis.stages(config.n_experts):
        torch.manual_seed(config.seed + n_experts)
        gate = mitosis.split_gate(layer, problem.hidden)
        heirs = mitosis.heirs(layer, gate, problem.inputs, problem.labels, keep_one=config.keep_one)
        layer = mitosis.split(layer, gate, heirs, problem.hidden, config.clone_noise)
        begun = len(layer.keys)
        last = n_experts == config.n_experts
        name = f"stage-{n_experts}"
        if last:
            progress = problem.learn(config, layer, name, data, budget=problem.budget)
        else:
            budget = mitosis.stage_budget(
                problem.n_classes, n_experts, config.stage_memory, problem.budget
            )
            progress = problem.learn(stage, layer, name, sampled, budget=budget)
        seconds += progress.seconds
        now = memory_curve(layer, [begun, *progress.rows])
        memory += now
        figures.append(
            {
                "experts": n_experts,
                **problem.tested(layer.eval()),
                "rows": len(layer.keys),
                "peak_memory": max(point["memory"] for point in now),
            }
        )
    return Learned(layer, seconds, figures, memory)


def check_budget(config: VectorsConfig, problem: Problem) -> None:
    """A copy of every class, spread over experts of about equal traffic, must fit."""
    least = problem.n_classes / config.n_experts
    if config.keep_one and problem.budget < least:
        raise warm_start.BudgetImpossible(
            f"{config.n_experts} experts with a copy of every class score {least:.1f} classes per"
            f" answer or more; {problem.budget:.1f} were asked for."
        )


def memory_curve(layer: DSSoftmax, rows: list[int]) -> list[dict[str, Any]]:
    """What gate and held rows take, in full softmaxes, from the numbers of rows over time."""
    experts, n_classes = layer.n_experts, layer.n_classes
    return [
        {"experts": experts, "rows": held, "memory": (held + experts) / n_classes} for held in rows
    ]


METHODS: dict[str, Callable[[VectorsConfig, Problem], Learned]] = {
    "warm": learn_warm,
    "mitosis": learn_mitosis,
    "dense": learn_dense,
}
