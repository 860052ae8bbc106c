"""A layer whose experts hold a head's own weight rows, so that its scores are the head's.

What is learned is which expert a query row goes to, which classes each expert holds, and how much
probability lies outside an expert.

B query rows, b query rows of one expert, D hidden, K experts, N classes, V classes of one expert.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from trainer.layer.bias import logits, with_one
from trainer.layer.ds_softmax import DSSoftmax, Output, Routing


class HeadSoftmax(DSSoftmax):
    """A sparse mixture of experts that share the weight rows of a full softmax.

    A class scores W h in every expert that holds it, as in the full softmax. So searching more
    experts never loses a class, and searching all of them gives the full softmax's own answer.

    Args:
        head: [N,D], or [N,D+1] with biases
        gate: [K,D], or [K,D+1] with biases
        keys: the (expert, class) pairs to hold, ascending, each as expert * N + class
        rest: [K,D+1], last column the bias: the row of each expert whose score estimates the log of
            the sum of e^score over the classes that the expert does not hold
        biased: gate and head have biases
    """

    head: Tensor
    rest: Tensor

    def __init__(
        self, head: Tensor, gate: Tensor, keys: Tensor, rest: Tensor, *, biased: bool = False
    ) -> None:
        n_classes, columns = head.shape
        # No expert has rows of its own.
        super().__init__(columns - biased, n_classes, len(gate), keys=keys[:0], biased=biased)
        self.keys = keys
        self.gate = nn.Parameter(gate.clone(), requires_grad=False)
        self.register_buffer("head", head)
        self.register_buffer("rest", rest)

    @property
    def expert_sizes(self) -> list[int]:
        sizes: list[int] = torch.bincount(self.expert_of_row, minlength=self.n_experts).tolist()
        return sizes

    @property
    def weight(self) -> Tensor:
        return self.head[self.class_of_row]  # [R,D]

    @property
    def held(self) -> Tensor:
        """Which classes each expert holds, [K,N]."""
        held = torch.zeros(self.n_experts * self.n_classes, dtype=torch.bool)
        held[self.keys] = True
        return held.view(self.n_experts, self.n_classes)

    def classes_of(self, expert: int) -> Tensor:
        """The classes [V] that an expert holds, ascending."""
        bounds = torch.tensor([expert, expert + 1]) * self.n_classes
        first, end = torch.searchsorted(self.keys, bounds).tolist()
        return self.keys[first:end] - expert * self.n_classes

    # --- scores -------------------------------------------------------------------------------

    def _scores(
        self, number: int, hidden: Tensor, gate: Tensor, k: int | None
    ) -> tuple[Tensor, Tensor]:
        """The head's logits of an expert's classes [b,V], and the estimated log Z [b]."""
        del gate, k
        scores = logits(hidden, self.head[self.classes_of(number)])
        return scores, torch.logaddexp(scores.logsumexp(dim=1), self.outside(number, hidden))

    def outside(self, number: int, hidden: Tensor) -> Tensor:
        """The estimated log of the sum of e^score over the classes [b] not in an expert."""
        if self.expert_sizes[number] == self.n_classes:
            return hidden.new_full((len(hidden),), -torch.inf)
        return with_one(hidden) @ self.rest[number]

    def log_normaliser(self, hidden: Tensor, routing: Routing | None = None) -> Tensor:
        """The estimated log Z [B] by each row's expert."""
        expert, gate = routing if routing is not None else self.route(hidden)
        found = hidden.new_empty(len(hidden))
        for _, rows, _, logsumexp in self._scored_groups(hidden, expert, gate):
            found[rows] = logsumexp
        return found

    # --- the verbs of DSSoftmax ---------------------------------------------------------------

    def forward(
        self, hidden: Tensor, target: Tensor | None = None, routing: Routing | None = None
    ) -> Output | Tensor:
        """As DSSoftmax. A target has its own score, also where its row's expert does not hold it:
        that takes one product more."""
        if target is None:
            return super().forward(hidden)
        score = (self.extended(hidden) * self.head[target]).sum(dim=1)  # [B]
        output = score - self.log_normaliser(hidden, routing)
        return Output(output, -output.mean())

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all N classes [B,N]. Those that a row's expert does not hold share
        what is estimated to lie outside it in equal parts."""
        expert, gate = self.route(hidden)
        result = hidden.new_zeros(len(hidden), self.n_classes)
        for number, rows, scores, logsumexp in self._scored_groups(hidden, expert, gate):
            absent = max(self.n_classes - scores.shape[1], 1)
            share = self.outside(number, hidden[rows]) - scores.new_tensor(absent).log()  # [b]
            dense = share[:, None].repeat(1, self.n_classes)
            dense[:, self.classes_of(number)] = scores
            result[rows] = dense - logsumexp[:, None]
        return result

    @torch.no_grad()
    def searched(self, hidden: Tensor, k: int, experts: int = 1) -> Tensor:
        """Log-probabilities [B,N] of the classes searched for a top-k answer, -inf for the others.

        A row whose experts would score N classes or more, or hold fewer than k of them all
        together, is answered by the whole head. Of several experts the one whose own classes weigh
        most gives the normaliser.
        """
        if not 1 <= k <= self.n_classes:
            raise ValueError(f"k must be in 1..{self.n_classes}")
        if not 1 <= experts <= self.n_experts:
            raise ValueError(f"experts must be in 1..{self.n_experts}")
        ranked = self._logits(hidden, self.gate).sort(dim=1, descending=True, stable=True).indices
        sizes = torch.tensor(self.expert_sizes)
        scanned = sizes[ranked[:, :experts]].sum(dim=1) >= self.n_classes  # [B]
        scanned |= torch.tensor(experts == self.n_experts)
        best = hidden.new_full((len(hidden), self.n_classes), -torch.inf)  # [B,N]
        weight = hidden.new_full((len(hidden),), -torch.inf)  # log of the sum over own classes
        normaliser = torch.zeros_like(weight)
        for rank in range(self.n_experts):
            wanting = best.isfinite().sum(dim=1) < k if rank >= experts else ~scanned
            todo = (wanting & ~scanned).nonzero()[:, 0]
            if not len(todo):
                break
            for rows, classes, scores, logsumexp in self._groups_at(hidden, ranked, rank, todo):
                best[rows[:, None], classes] = scores
                own = scores.logsumexp(dim=1)
                heavier = own > weight[rows]
                weight[rows[heavier]] = own[heavier]
                normaliser[rows[heavier]] = logsumexp[heavier]
        best -= normaliser[:, None]
        scanned |= best.isfinite().sum(dim=1) < k
        best[scanned] = torch.log_softmax(logits(hidden[scanned], self.head), dim=1)
        return best

    def _groups_at(
        self, hidden: Tensor, ranked: Tensor, rank: int, todo: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """For each expert at a rank of some rows: rows [b], classes [V], scores, log Z [b]."""
        unused = hidden.new_ones(len(todo))
        groups = self._scored_groups(hidden[todo], ranked[todo, rank], unused)
        for number, rows, scores, logsumexp in groups:
            yield todo[rows], self.classes_of(number), scores, logsumexp


def keys_of(held: Tensor) -> Tensor:
    """The pairs of a [K,N] mask, as a layer's keys."""
    return held.flatten().nonzero()[:, 0]


def split_by_expert(layer: HeadSoftmax) -> list[Tensor]:
    """The classes of each expert."""
    bounds = torch.searchsorted(
        layer.keys, torch.arange(layer.n_experts + 1) * layer.n_classes
    ).tolist()
    classes = layer.class_of_row
    return [classes[first:end] for first, end in pairwise(bounds)]
