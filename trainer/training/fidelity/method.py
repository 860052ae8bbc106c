"""The method of fidelity: a gate and experts over the head's own rows.

Vectors are clustered into a first gate. Then two steps take turns: each expert holds the classes
that the head answers to its query rows, within the budget; and the gate learns to name the experts
that hold a row's answers. Weight rows never change.

S sampled query rows, D hidden, K experts, N classes.
"""

from pathlib import Path

import torch
from torch import Tensor

from trainer.layer import DSSoftmax
from trainer.layer.bias import logits, with_one
from trainer.layer.head_softmax import HeadSoftmax, keys_of
from trainer.training import metrics
from trainer.training.config import VectorsConfig
from trainer.training.fidelity.classes import demand, values
from trainer.training.fidelity.gate import learn_gate
from trainer.training.fidelity.rest import fit_rest
from trainer.training.fidelity.teacher import Answers, head_answers
from trainer.training.loop import Data
from trainer.training.problem import Learned, Problem
from trainer.training.warm_start import cluster_gate, select

ANSWERS = 50  # of the head to each row, by which classes are chosen
TAUGHT = 10  # of these, what the gate learns to find
ROUNDS = 3
EPOCHS = 4  # of the gate in each round
LEARNING_RATE = 0.02  # of a gate whose inputs have length 1 on average


def start(config: VectorsConfig, problem: Problem) -> HeadSoftmax:
    """A layer whose gate was found by clustering, with the classes that the budget allows."""
    with problem.clock.phase("clustering"):
        gate = cluster_gate(problem.hidden, config.n_experts, config.seed, biased=problem.biased)
    answers = taught_answers(problem)
    with problem.clock.phase("choosing classes"):
        return choose(config, problem, gate, answers)


def learn(
    config: VectorsConfig,
    problem: Problem,
    layer: DSSoftmax,
    data: Data,
    folder: Path,
    *,
    resume: bool,
) -> Learned:
    """Rounds of gate and classes; the best layer of all, the start included, is kept."""
    del data, folder, resume  # it takes minutes, and begins anew
    assert isinstance(layer, HeadSoftmax)  # noqa: S101
    answers = taught_answers(problem)
    taught, worth = answers.first(TAUGHT), values(answers.first(TAUGHT))
    inputs = with_one(problem.hidden) if problem.biased else problem.hidden
    length = inputs.norm(dim=1).mean()
    best, best_score = layer, score(problem, layer)
    for number in range(ROUNDS):
        held = torch.zeros(config.n_experts * problem.n_classes, dtype=torch.bool)
        held[layer.keys] = True
        gate = learn_gate(
            layer.gate.detach() * length,
            inputs / length,
            taught,
            worth,
            held.view(config.n_experts, -1),
            epochs=EPOCHS,
            learning_rate=LEARNING_RATE,
            seed=config.seed + number,
        )
        layer = choose(config, problem, gate / length, answers)
        found = score(problem, layer)
        if found > best_score:
            best, best_score = layer, found
    best.rest = fit_rest(best, problem.hidden, answers.logsumexp)
    return Learned(best, 0.0, kept_start=best is layer)


def taught_answers(problem: Problem) -> Answers: ...


def choose(
    config: VectorsConfig, problem: Problem, gate: Tensor, answers: Answers
) -> HeadSoftmax:
    gate_logits = logits(problem.hidden, gate)  # [S,K]
    wanted = demand(gate_logits, answers, values(answers), problem.n_classes)
    held = select(wanted, problem.budget, keep_one=config.keep_one)
    rest = torch.zeros(config.n_experts, problem.hidden.shape[1] + 1)
    return HeadSoftmax(problem.head, gate, keys_of(held), rest, biased=problem.biased)


def score(problem: Problem, layer: HeadSoftmax) -> float:
    """What is held of the head's first answer and first ten, on the rows for choices."""
    found = metrics.reachable_recall(layer, problem.choice.hidden, problem.choice.full.best)
    return found["1"] + found["10"]
