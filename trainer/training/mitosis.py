"""Mitosis: the number of experts doubles between stages, and pruned classes stay pruned.

Each expert becomes two with the same weight rows. Their gate rows are moved apart along the
direction in which the expert's query rows vary most, so that each receives about half of them, and
a clone holds only classes that some training row of the class reaches it with.

S sampled query rows, D hidden, K experts, N classes, R weight rows, V weight rows of one expert.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.data.rows import Rows
from trainer.layer import DSSoftmax
from trainer.layer.bias import logits
from trainer.layer.pruning import spare_best
from trainer.training.config import VectorsConfig
from trainer.training.idle_experts import split_direction
from trainer.training.loop import Data
from trainer.training.metrics import label_counts
from trainer.training.problem import Learned, Problem, check_budget, memory_curve, train_stage

SEPARATION = 4.0  # standard deviation of the gate logits' difference between clones


def start(config: VectorsConfig, problem: Problem) -> DSSoftmax:
    """The full softmax as a layer of a single expert."""
    check_budget(config, problem)
    return one_expert(problem.head, biased=problem.biased)


def learn(
    config: VectorsConfig,
    problem: Problem,
    layer: DSSoftmax,
    data: Data,
    folder: Path,
    *,
    resume: bool,
) -> Learned:
    """Algorithm 2 of the paper: from 2 experts to K by doubling."""
    sampled = sampled_data(problem, data)
    early = replace(config, epochs=config.stage_epochs)
    seconds = 0.0
    figures: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    for n_experts in stages(config.n_experts):
        torch.manual_seed(config.seed + n_experts)
        gate = split_gate(layer, problem.hidden)
        kept = inherited(layer, gate, problem.inputs, problem.labels, keep_one=config.keep_one)
        layer = split(layer, gate, kept, problem.hidden, config.clone_noise)
        begun = len(layer.keys)
        stage = folder / f"stage-{n_experts}"
        if n_experts == config.n_experts:
            done = train_stage(config, layer, data, stage, budget=problem.budget, resume=resume)
        else:
            budget = stage_budget(problem.n_classes, n_experts, config.stage_memory, problem.budget)
            done = train_stage(early, layer, sampled, stage, budget=budget, resume=resume)
        seconds += done.seconds
        now = memory_curve(layer, [begun, *done.rows])
        memory += now
        figures.append(
            {
                "experts": n_experts,
                **problem.report.figures(layer.eval()),
                "rows": len(layer.keys),
                "peak_memory": max(point["memory"] for point in now),
            }
        )
    return Learned(layer, seconds, figures, memory)


def sampled_data(problem: Problem, whole: Data) -> Data:
    """The sampled rows alone, in memory: for stages that need not see every row."""
    logsumexp = None if whole.logsumexp is None else whole.logsumexp[problem.sampled]
    labels = problem.labels[problem.sampled]
    return replace(whole, inputs=problem.hidden, labels=labels, logsumexp=logsumexp)


def one_expert(head: Tensor, *, biased: bool = False) -> DSSoftmax:
    """The full softmax [N,D], or [N,D+1] with biases, as a layer of a single expert."""
    n_classes, columns = head.shape
    layer = DSSoftmax(columns - biased, n_classes, 1, biased=biased)
    layer.gate.data = torch.zeros(1, columns)  # its gate value is 1 everywhere
    layer.experts[0].data = head.clone()
    return layer


@torch.no_grad()
def split_gate(layer: DSSoftmax, hidden: Tensor) -> Tensor:
    """A gate for twice the experts; `hidden` [S,D] shows which query rows each one receives.

    Expert k becomes k and k + K.
    """
    expert = logits(hidden, layer.gate).argmax(dim=1)  # [S]
    inputs = layer.extended(hidden)
    directions = [split_direction(inputs[expert == number]) for number in range(layer.n_experts)]
    apart = torch.stack(directions) * (SEPARATION / 2)  # [K,D]
    return torch.cat([layer.gate + apart, layer.gate - apart])


@torch.no_grad()
def inherited(
    layer: DSSoftmax, gate: Tensor, inputs: Rows, labels: Tensor, *, keep_one: bool
) -> Tensor:
    """Which of the doubled weight rows, [2R] bool, the clones get: the others are never made.

    Those whose class is the label of a training row that reaches the clone; and with `keep_one`,
    for a class that would have no copy, the one whose expert receives most rows of the class.
    """
    contexts = label_counts(gate, inputs, labels, layer.n_classes)  # by clone and class
    found = contexts.flatten()[doubled_keys(layer)]  # [2R]
    kept = found > 0
    if not keep_one:
        return kept
    return spare_best(layer.class_of_row.repeat(2), kept, found, layer.row_squares().repeat(2))


def doubled_keys(layer: DSSoftmax) -> Tensor:
    return torch.cat([layer.keys, layer.keys + layer.n_experts * layer.n_classes])  # [2R]


@torch.no_grad()
def split(layer: DSSoftmax, gate: Tensor, kept: Tensor, hidden: Tensor, noise: float) -> DSSoftmax:
    """The layer with twice the experts and the `kept` [2R] of the doubled weight rows.

    Gaussian `noise`, relative to a weight row's size, makes clones differ. A clone's gate value is
    lower than the expert's was, so weight rows are scaled up by as much: scores stay the same.
    """
    n_experts = layer.n_experts
    doubled = DSSoftmax(
        layer.in_features,
        layer.n_classes,
        2 * n_experts,
        keys=doubled_keys(layer)[kept],
        biased=layer.biased,
    )
    doubled.gate.data = gate
    expert, before = layer.eval().route(hidden)
    after = doubled.eval().route(hidden).gate
    scale = mean_by_expert(before, expert, n_experts) / mean_by_expert(after, expert, n_experts)
    masks = kept.split([*layer.expert_sizes, *layer.expert_sizes])
    for number, (clone, mask) in enumerate(zip(doubled.experts, masks, strict=True)):
        rows = layer.experts[number % n_experts][mask] * scale[number % n_experts]  # [V,D]
        size = rows.square().mean(dim=1, keepdim=True).sqrt()  # [V,1]
        clone.data = rows + noise * size * torch.randn_like(rows)
    return doubled


def mean_by_expert(values: Tensor, expert: Tensor, n_experts: int) -> Tensor:
    """Means [K] of [S] values; 1 where there is none."""
    sums = torch.zeros(n_experts).index_add(0, expert, values)
    counts = torch.bincount(expert, minlength=n_experts)
    return torch.where(counts > 0, sums / counts.clamp_min(1), 1.0)


def stages(n_experts: int) -> list[int]:
    """2, 4, ... up to the number of experts."""
    return [2**power for power in range(1, n_experts.bit_length())]


def stage_budget(n_classes: int, n_experts: int, memory: float, last: float) -> float:
    """Mean classes scored at the end of a stage: experts together take so many full softmaxes.

    None goes below the budget of the last stage.
    """
    return max(last, memory * n_classes / n_experts)
