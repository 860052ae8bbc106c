"""The method of fidelity: a gate and experts over the head's own rows.

Vectors are clustered into a first gate. Then two steps take turns: each expert holds the classes
that the head answers to its query rows, within the budget; and the gate learns to name the expert
that holds a row's answers, less what it costs to search it. Both raise one sum, the worth of the
answers that are found less the price of the classes that are searched, where the price of a class
is what the budget makes it. Weight rows never change.

S sampled query rows, D hidden, K experts, N classes.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.layer import DSSoftmax
from trainer.layer.bias import logits, with_one
from trainer.layer.head_softmax import HeadSoftmax, keys_of
from trainer.training import metrics
from trainer.training.config import VectorsConfig
from trainer.training.fidelity.classes import MEASURED, demand, places_of_rest, values
from trainer.training.fidelity.gate import BATCH, learn_gate
from trainer.training.fidelity.geometry import log_chances
from trainer.training.fidelity.rest import fit_rest, unbiased
from trainer.training.fidelity.teacher import Answers
from trainer.training.loop import Data
from trainer.training.problem import BudgetImpossible, Learned, Problem
from trainer.training.warm_start import (
    Demand,
    cluster_gate,
    held_above,
    least_gain,
    rows_needed,
)

ANSWERS = 50  # of the head to each row, by which classes are chosen
# How fast the worth of answers behind the first ten fades, in spans of the first ten's scores; the
# rows for choices decide.
FADINGS = (0.0, 0.05, 0.15, 0.3)
ROUNDS = 10
LEAST_STEPS = 100  # of the gate in each round, which else takes one epoch
CHOOSER = "chooser"  # of what a problem keeps
LEARNING_RATE = 0.05  # of a gate whose inputs have length 1 on average


class Chosen(NamedTuple):
    layer: HeadSoftmax
    wanted: Tensor  # [K,N] what it holds for the sake of answers, not of keep-one
    cost: Tensor  # [K] of searching an expert, in shares of a row's worth


class Chooser:
    """Makes layers of a gate: which classes its experts hold within the budget."""

    def __init__(self, config: VectorsConfig, problem: Problem, answers: Answers) -> None:
        self._config, self._problem, self._answers = config, problem, answers
        last = min(MEASURED, answers.scores.shape[1]) - 1
        self._last = answers.scores[:, last]
        self._span = float((answers.scores[:, 0] - self._last).mean())
        self._fallback: Tensor | None = None  # [N] the expert of a class that none wants ...
        self._placed_by: Tensor | None = None  # ... by this gate

    def worth(self, fading: float) -> Tensor:
        """Of each answer, [S,T]."""
        return values(self._answers, fading * self._span)

    def layer(self, gate: Tensor, fading: float, budget: float | None = None) -> Chosen:
        worth = self.worth(fading)
        wanted = self._demand(gate, worth)
        price = least_gain(wanted, budget or self._problem.budget, self._fallback)
        held = held_above(price, wanted, self._fallback)
        rest = torch.zeros(len(gate), self._problem.hidden.shape[1] + 1)
        layer = HeadSoftmax(
            self._problem.head, gate, keys_of(held), rest, biased=self._problem.biased
        )
        # The gate sees nothing of copies for the sake of keep-one. If it saw them it would send
        # rows there, where copies are cheap only because few rows come.
        above = wanted.share > price
        return Chosen(layer, above, price * above.sum(dim=1) / worth.sum(dim=1).mean())

    def fitting(self, gate: Tensor, fading: float) -> Chosen:
        """As `layer`. Where rows have come to go where the copies are, these are placed anew."""
        try:
            return self.layer(gate, fading)
        except BudgetImpossible:
            self.place_rest(gate)
            return self.layer(gate, fading)

    def settled(self, layer: HeadSoftmax, fading: float) -> HeadSoftmax:
        """The same gate with the classes that suit it best, and the budget as the rows for choices
        use it: they go to other experts than the rows that were learned from, a little."""
        gate, budget = layer.gate.detach(), self._problem.budget
        self.place_rest(gate)
        try:
            used = self._problem.choice.figures(self.layer(gate, fading).layer)["mean_rows"]
            return self.best_fading(gate, budget**2 / max(used, 1.0))[1].layer
        except BudgetImpossible:  # there is no room but for a copy of every class
            return layer

    def place_rest(self, gate: Tensor) -> None:
        """Finds the experts of classes that no expert wants, if each class is to have a copy."""
        known = self._placed_by is not None and torch.equal(self._placed_by, gate)
        if known or not self._config.keep_one:
            return
        self._placed_by = gate
        problem, expert = self._problem, self._experts(gate)
        chances = log_chances(problem.hidden, expert, self._last, problem.head, len(gate))
        traffic = torch.bincount(expert, minlength=len(gate)).float() / len(expert)
        self._fallback = places_of_rest(chances, traffic, problem.budget)

    def score(self, layer: HeadSoftmax) -> float:
        """What is held of the head's first answer and first ten, on the rows for choices."""
        choice = self._problem.choice
        found = metrics.reachable_recall(layer, choice.hidden, choice.full.best)
        return found["1"] + found["10"]

    def best_fading(self, gate: Tensor, budget: float | None = None) -> tuple[float, Chosen]:
        layers = {fading: self.layer(gate, fading, budget) for fading in FADINGS}
        best = max(layers, key=lambda fading: self.score(layers[fading].layer))
        return best, layers[best]

    def rows_needed(self, layer: HeadSoftmax) -> float | None:
        """How many classes an answer must score for 99% of first answers; None: no number helps."""
        gate = layer.gate.detach()
        wanted = self._demand(gate, self.worth(FADINGS[-1]))
        return rows_needed(self._problem, layer, wanted, self._fallback)

    def _demand(self, gate: Tensor, worth: Tensor) -> Demand:
        n_classes = self._problem.n_classes
        return demand(self._experts(gate), self._answers, worth, len(gate), n_classes)

    def _experts(self, gate: Tensor) -> Tensor:
        return logits(self._problem.hidden, gate).argmax(dim=1)  # [S]


def chooser_of(config: VectorsConfig, problem: Problem) -> Chooser:
    """The same one in all steps of a run: what it has found is found once."""
    if CHOOSER not in problem.kept:
        problem.kept[CHOOSER] = Chooser(config, problem, problem.answers(ANSWERS))
    found = problem.kept[CHOOSER]
    assert isinstance(found, Chooser)  # noqa: S101
    return found


def start(config: VectorsConfig, problem: Problem) -> HeadSoftmax:
    """A layer whose gate was found by clustering, with the classes that the budget allows."""
    with problem.clock.phase("clustering"):
        gate = cluster_gate(problem.hidden, config.n_experts, config.seed, biased=problem.biased)
    chooser = chooser_of(config, problem)
    with problem.clock.phase("choosing classes"):
        chooser.place_rest(gate)
        return chooser.best_fading(gate)[1].layer


def allowance(config: VectorsConfig, problem: Problem, layer: DSSoftmax) -> float | None:
    """See `warm_start.allowance`."""
    assert isinstance(layer, HeadSoftmax)  # noqa: S101
    chooser = chooser_of(config, problem)
    chooser.place_rest(layer.gate.detach())
    return chooser.rows_needed(layer)


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
    answers, chooser = problem.answers(ANSWERS), chooser_of(config, problem)
    chooser.place_rest(layer.gate.detach())
    fading, chosen = chooser.best_fading(layer.gate.detach())
    taught = answers if fading else answers.first(MEASURED)
    worth = chooser.worth(fading)[:, : taught.classes.shape[1]]
    inputs = with_one(problem.hidden) if problem.biased else problem.hidden
    length = inputs.norm(dim=1).mean()
    best, best_score = started, chooser.score(started)
    for number in range(ROUNDS):
        gate = learn_gate(
            chosen.layer.gate.detach() * length,
            inputs / length,
            taught,
            worth,
            chosen.wanted,
            chosen.cost,
            epochs=math.ceil(LEAST_STEPS * BATCH / len(inputs)),
            learning_rate=LEARNING_RATE,
            seed=config.seed + number,
        )
        chosen = chooser.fitting(gate / length, fading)
        found = chooser.score(chosen.layer)
        if found > best_score:
            best, best_score = chosen.layer, found
    kept_start = best is started
    best = chooser.settled(best, fading)
    best.rest = fit_rest(best, problem.hidden, answers.logsumexp)
    best.rest = unbiased(best, problem.choice.hidden, problem.choice.logsumexp)
    return Learned(best, 0.0, kept_start=kept_start)
