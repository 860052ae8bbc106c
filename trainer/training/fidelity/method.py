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
from trainer.training.fidelity.classes import MEASURED, demand, places_of_rest, values
from trainer.training.fidelity.gate import learn_gate
from trainer.training.fidelity.geometry import log_chances
from trainer.training.fidelity.rest import fit_rest
from trainer.training.fidelity.teacher import Answers
from trainer.training.loop import Data
from trainer.training.problem import Learned, Problem
from trainer.training.warm_start import cluster_gate, select

ANSWERS = 50  # of the head to each row, by which classes are chosen
# How fast the worth of answers behind the first ten fades, in spans of the first ten's scores; the
# rows for choices decide.
FADINGS = (0.0, 0.05, 0.15)
ROUNDS = 3
EPOCHS = 3  # of the gate in each round
LEARNING_RATE = 0.02  # of a gate whose inputs have length 1 on average


class Chooser:
    """Makes layers of a gate: which classes its experts hold within the budget."""

    def __init__(self, config: VectorsConfig, problem: Problem, answers: Answers) -> None:
        self._config, self._problem, self._answers = config, problem, answers
        last = min(MEASURED, answers.scores.shape[1]) - 1
        self._last = answers.scores[:, last]
        self.span = float((answers.scores[:, 0] - self._last).mean())

    def layer(self, gate: Tensor, fading: float) -> HeadSoftmax:
        config, problem = self._config, self._problem
        expert = logits(problem.hidden, gate).argmax(dim=1)  # [S]
        worth = values(self._answers, fading * self.span)
        wanted = demand(expert, self._answers, worth, len(gate), problem.n_classes)
        fallback = None
        if config.keep_one:
            chances = log_chances(problem.hidden, expert, self._last, problem.head, len(gate))
            fallback = places_of_rest(chances, wanted.utilization, problem.budget)
        held = select(wanted, problem.budget, keep_one=config.keep_one, fallback=fallback)
        rest = torch.zeros(len(gate), problem.hidden.shape[1] + 1)
        return HeadSoftmax(problem.head, gate, keys_of(held), rest, biased=problem.biased)

    def score(self, layer: HeadSoftmax) -> float:
        """What is held of the head's first answer and first ten, on the rows for choices."""
        choice = self._problem.choice
        found = metrics.reachable_recall(layer, choice.hidden, choice.full.best)
        return found["1"] + found["10"]

    def best_fading(self, gate: Tensor) -> tuple[float, HeadSoftmax]:
        layers = {fading: self.layer(gate, fading) for fading in FADINGS}
        best = max(layers, key=lambda fading: self.score(layers[fading]))
        return best, layers[best]


def start(config: VectorsConfig, problem: Problem) -> HeadSoftmax:
    """A layer whose gate was found by clustering, with the classes that the budget allows."""
    with problem.clock.phase("clustering"):
        gate = cluster_gate(problem.hidden, config.n_experts, config.seed, biased=problem.biased)
    answers = problem.answers(ANSWERS)
    with problem.clock.phase("choosing classes"):
        return Chooser(config, problem, answers).best_fading(gate)[1]


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
    started = layer
    answers = problem.answers(ANSWERS)
    chooser = Chooser(config, problem, answers)
    fading, _ = chooser.best_fading(layer.gate.detach())
    taught = answers.first(MEASURED)
    worth = values(taught, 0.0)
    inputs = with_one(problem.hidden) if problem.biased else problem.hidden
    length = inputs.norm(dim=1).mean()
    best, best_score = layer, chooser.score(layer)
    for number in range(ROUNDS):
        gate = learn_gate(
            layer.gate.detach() * length,
            inputs / length,
            taught,
            worth,
            layer.held,
            epochs=EPOCHS,
            learning_rate=LEARNING_RATE,
            seed=config.seed + number,
        )
        layer = chooser.layer(gate / length, fading)
        found = chooser.score(layer)
        if found > best_score:
            best, best_score = layer, found
    best.rest = fit_rest(best, problem.hidden, answers.logsumexp)
    return Learned(best, 0.0, kept_start=best is started)
