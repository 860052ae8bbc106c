"""Algorithm 1 of the paper: every expert begins as the full softmax and is pruned."""

from pathlib import Path

import torch

from trainer.layer import DSSoftmax
from trainer.training import warm_start
from trainer.training.config import VectorsConfig
from trainer.training.loop import Data
from trainer.training.problem import Learned, Problem, check_budget, memory_curve, train_stage


def start(config: VectorsConfig, problem: Problem) -> DSSoftmax:
    """A layer with a random gate and all classes in every expert."""
    check_budget(config, problem)
    torch.manual_seed(config.seed)
    directions = torch.randn(config.n_experts, problem.head.shape[1])
    gate = warm_start.sharpened(problem.hidden, directions)
    everything = torch.ones(config.n_experts, problem.n_classes, dtype=torch.bool)
    return warm_start.make_layer(gate, everything, problem.head, None, biased=problem.biased)


def learn(
    config: VectorsConfig,
    problem: Problem,
    layer: DSSoftmax,
    data: Data,
    folder: Path,
    *,
    resume: bool,
) -> Learned:
    """Train the layer while the lassos prune it down to the budget."""
    begun = len(layer.keys)
    done = train_stage(config, layer, data, folder / "dense", budget=problem.budget, resume=resume)
    return Learned(layer, done.seconds, memory=memory_curve(layer, [begun, *done.rows]))
