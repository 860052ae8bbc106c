"""The warm start: experts from clusters of hidden vectors and the full softmax's own answers.

Vectors are clustered by direction; a cluster's centre becomes a row of the gate, and the classes
that the full softmax puts among its first for the cluster's vectors become the expert.

S sampled query rows, D hidden, K experts, N classes, R weight rows.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from sklearn.cluster import KMeans
from torch import Tensor
from torch.nn.functional import normalize

from service.bundle.manifest import RECALL_AT
from service.terminal import progress
from trainer.data.arrays import chunks
from trainer.data.rows import Rows
from trainer.layer import DSSoftmax
from trainer.layer.bias import logits, with_one
from trainer.training.answer_gains import Gains
from trainer.training.best_epoch import BestEpoch, load_layer, save_layer
from trainer.training.config import VectorsConfig
from trainer.training.loop import Data
from trainer.training.metrics import ROWS_AT_ONCE, accuracy_at, label_counts
from trainer.training.problem import BudgetImpossible, HeldOut, Learned, Problem, train_stage
from trainer.training.verdict import KEPT

WARM_ROUNDS = 2  # of training
GATE_VALUE = 0.8  # mean of the best gate value at the start: the gradient has not vanished yet
CLUSTER_ROWS = 100_000
SEARCH_STEPS = 50
START = "start.pt"  # of a run: the layer before it learned anything
ROUNDING = 1e-6
LEAST_TRAFFIC = 0.1  # of an equal share
COPIES = 0.6  # share of the budget that copies for the sake of keep-one may take
# Exponents on the price of an expert, tried in turn until the copies fit.
PRICE_EXPONENTS = (1.0, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0)


def start(config: VectorsConfig, problem: Problem) -> DSSoftmax:
    """A layer whose gate was found by clustering, with the classes that the budget allows."""
    with problem.clock.phase("clustering"):
        gate = cluster_gate(problem.hidden, config.n_experts, config.seed, biased=problem.biased)
    return choose_classes(config, problem, gate, before=None)


def learn(
    config: VectorsConfig,
    problem: Problem,
    layer: DSSoftmax,
    data: Data,
    folder: Path,
    *,
    resume: bool,
) -> Learned:
    """Gate and weight rows learn together. That changes where query rows go, so classes are then
    chosen again, and their weight rows learn with the gate held fixed: the budget holds.

    Each round ends with its best epoch on the rows for choices. If even the last round's is no
    better than the start there, the start is kept.
    """
    seconds = 0.0
    save_layer(folder / START, layer)
    rounds: list[BestEpoch] = []
    for number in range(1, WARM_ROUNDS + 1):
        if number > 1:
            layer = choose_classes(config, problem, layer.gate.detach(), before=layer)
        layer.gate.requires_grad_(number < WARM_ROUNDS)
        torch.manual_seed(config.seed + number)
        stage = folder / f"round-{number}"
        best = kept_epochs(stage, layer, problem.choice, resume=resume)
        seconds += train_stage(config, layer, data, stage, best=best, resume=resume).seconds
        best.restore(layer)
        rounds.append(best)
    kept_start = rounds[-1].best <= rounds[0].scores[0]
    if kept_start:
        load_layer(folder / START, layer)
    return Learned(layer, seconds, kept_start=kept_start)


def kept_epochs(folder: Path, layer: DSSoftmax, choice: HeldOut, *, resume: bool) -> BestEpoch:
    """The epochs of a round, of which the first is the layer that it begins with."""

    def score(layer: DSSoftmax) -> float:
        """Label accuracy at 1 and at 10 matter alike."""
        found = accuracy_at(layer, choice.hidden, choice.labels)
        return found["1"] + found["10"]

    folder.mkdir(exist_ok=True)
    best = BestEpoch(folder, score, resume=resume)
    if 0 not in best.scores:
        best.measure(layer, 0)
    return best


def choose_classes(
    config: VectorsConfig, problem: Problem, gate: Tensor, before: DSSoftmax | None
) -> DSSoftmax:
    """A layer with this gate that holds the most wanted classes within the budget."""
    with problem.clock.phase("choosing classes"):
        wanted = problem_demand(gate, problem)
        held = select(wanted, problem.budget, keep_one=config.keep_one)
        return make_layer(gate, held, problem.head, before, biased=problem.biased)


def allowance(config: VectorsConfig, problem: Problem, layer: DSSoftmax) -> float | None:
    """How many classes an answer must score, about, so that experts hold the full softmax's first
    class for 99% of the rows for choices; None if no budget does."""
    wanted = problem_demand(layer.gate.detach(), problem)
    fallback = fallback_experts(wanted, COPIES * problem.budget) if config.keep_one else None
    return rows_needed(problem, layer, wanted, fallback)


@dataclass(frozen=True)
class Demand:
    """How useful each class would be in each expert."""

    gain: Tensor  # [K,N] expected right answers that the class gives in the expert
    rows: Tensor  # [K] sampled query rows that each expert receives
    labels: Tensor  # [K,N] how often a class is the label, over all training rows

    @cached_property
    def share(self) -> Tensor:
        """The gain per query row that the expert receives, [K,N]."""
        return self.gain / self.rows.clamp_min(1)[:, None]

    @property
    def utilization(self) -> Tensor:
        return self.rows / self.rows.sum()


def cluster_gate(hidden: Tensor, n_experts: int, seed: int, *, biased: bool = False) -> Tensor:
    """A gate [K,D], or [K,D+1] with biases, whose rows point to the centres of K clusters of
    hidden vectors [S,D]."""
    clustered = hidden[:CLUSTER_ROWS]
    directions = normalize(with_one(clustered) if biased else clustered).numpy()
    with progress.bar("clustering", None):
        means = KMeans(n_experts, n_init=1, max_iter=50, random_state=seed).fit(directions)
    return sharpened(hidden, torch.from_numpy(means.cluster_centers_.astype(np.float32)))


def sharpened(hidden: Tensor, directions: Tensor) -> Tensor:
    """A gate along the directions [K,D], or [K,D+1], whose mean value is GATE_VALUE."""
    unit = normalize(directions)
    return unit * _sharpness(logits(hidden[:CLUSTER_ROWS], unit))


def _sharpness(logits: Tensor) -> float:
    """The factor on logits [S,K] at which the largest softmax value is GATE_VALUE on average."""
    low, high = 1e-3, 1e3
    for _ in range(SEARCH_STEPS):
        middle = (low * high) ** 0.5
        value = torch.softmax(middle * logits, dim=1).max(dim=1).values.mean()
        low, high = (middle, high) if value < GATE_VALUE else (low, middle)
    return low


@torch.no_grad()
def demand(gate: Tensor, hidden: Tensor, gains: Gains, inputs: Rows, labels: Tensor) -> Demand:
    """Sum what the full softmax would answer in each expert, over sampled rows `hidden` [S,D].

    Labels are counted over all rows of `inputs`: a sample has too few of a rare class.
    """
    n_experts, n_classes = len(gate), gains.n_classes
    gain = torch.zeros(n_experts * n_classes)  # added to in place: a chunk has few pairs
    received = torch.zeros(n_experts)
    for part in chunks(len(hidden), ROWS_AT_ONCE):
        expert = logits(hidden[part], gate).argmax(dim=1)  # [b]
        pairs = expert[:, None] * n_classes + gains.best[part]  # [b,10]
        gain.index_add_(0, pairs.flatten(), gains.value[part].flatten())
        received += torch.bincount(expert, minlength=n_experts)
    right = label_counts(gate, inputs, labels, n_classes)
    return Demand(gain.view(n_experts, -1), received, right)


def problem_demand(gate: Tensor, problem: Problem) -> Demand:
    return demand(gate, problem.hidden, problem.sampled_gains, problem.inputs, problem.labels)


def select(
    wanted: Demand, mean_rows: float, *, keep_one: bool, fallback: Tensor | None = None
) -> Tensor:
    """Which classes each expert holds, [K,N] bool: the most wanted ones that the budget allows.

    A class in expert k adds u_k to the mean number of classes scored, so pairs are taken in the
    order of their gain per query row of the expert.
    """
    if keep_one and fallback is None:
        fallback = fallback_experts(wanted, COPIES * mean_rows)
    return held_above(least_gain(wanted, mean_rows, fallback), wanted, fallback)


def held_above(threshold: float, wanted: Demand, fallback: Tensor | None) -> Tensor:
    """The pairs [K,N] whose gain per query row is above the threshold, and copies in `fallback`."""
    held = wanted.share > threshold
    return held if fallback is None else with_one_copy(held, fallback)


def least_gain(wanted: Demand, mean_rows: float, fallback: Tensor | None) -> float:
    """The gain per query row above which pairs fit into the budget."""
    low, high = 0.0, float(len(RECALL_AT))
    if mean_cost(held_above(low, wanted, fallback), wanted) <= mean_rows:
        return low
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        fits = mean_cost(held_above(middle, wanted, fallback), wanted) <= mean_rows
        low, high = (low, middle) if fits else (middle, high)
    chosen = held_above(high, wanted, fallback)
    least = mean_cost(chosen, wanted)
    if least > mean_rows or not chosen.any():
        raise BudgetImpossible(
            f"No layer of {len(wanted.rows)} experts has {mean_rows:.1f} classes per answer"
            f"{'' if fallback is None else ' with a copy of every class'}; the least is"
            f" {least:.1f}."
        )
    return high


@torch.no_grad()
def rows_needed(
    problem: Problem, layer: DSSoftmax, wanted: Demand, fallback: Tensor | None
) -> float | None:
    """See `allowance`. A pair of expert and class is held if its gain per query row is above a
    threshold. The threshold below which too many of the rows' pairs lie gives the cost."""
    expert = layer.route(problem.choice.hidden).expert  # [T]
    needed = wanted.share[expert, problem.choice.full.best[:, 0]].sort().values  # [T]
    threshold = float(needed[int((1 - KEPT) * len(needed))])
    if threshold <= 0:
        return None
    return mean_cost(held_above(threshold * (1 - ROUNDING), wanted, fallback), wanted)


def mean_cost(held: Tensor, wanted: Demand) -> float:
    """Classes scored per query row: sum_k u_k |v_k|."""
    return float(wanted.utilization @ held.sum(dim=1).float())


def fallback_experts(wanted: Demand, affordable: float) -> Tensor:
    """The expert [N] that gets the copy of each class that is selected for none.

    It is the expert in which the class is the label most often, relative to the expert's share of
    the traffic. An expert without traffic would cost nothing, and a copy there is never found: so
    each expert counts as if it had a little more traffic than it has. Where all copies together
    cost more than is affordable, experts with little traffic are preferred more and more.
    """
    traffic = wanted.labels.sum(dim=1)  # [K]
    price = (traffic + LEAST_TRAFFIC * traffic.mean()) / traffic.sum().clamp_min(1)
    for exponent in PRICE_EXPONENTS:
        chosen = ((wanted.labels + 1e-3) / price[:, None] ** exponent).argmax(dim=0)
        if float(wanted.utilization[chosen].sum()) <= affordable:
            break
    return chosen


def with_one_copy(held: Tensor, fallback: Tensor) -> Tensor:
    """Give each class that no expert holds a copy in its fallback expert [N]."""
    missing = (~held.any(dim=0)).nonzero()[:, 0]
    held = held.clone()
    held[fallback[missing], missing] = True
    return held


def make_layer(
    gate: Tensor, held: Tensor, head: Tensor, before: DSSoftmax | None, *, biased: bool = False
) -> DSSoftmax:
    """A layer with the given gate and classes; weight rows come from `before`, else the head."""
    n_classes, columns = head.shape
    keys = held.flatten().nonzero()[:, 0]
    layer = DSSoftmax(columns - biased, n_classes, len(gate), keys=keys, biased=biased)
    weight = head[layer.class_of_row] / GATE_VALUE  # [R,D]
    if before is not None:
        row, known = before.row_of(layer.expert_of_row, layer.class_of_row)
        weight[known] = before.weight[row[known]]
    layer.gate.data = gate.clone()
    for expert, rows in zip(layer.experts, weight.split(layer.expert_sizes), strict=True):
        expert.data = rows.clone()
    return layer
