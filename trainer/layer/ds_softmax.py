"""The doubly sparse output layer.

B query rows, D hidden, K experts, N classes, R weight rows of all experts, V weight rows of one.
"""

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from service.topk import SPARSE, Mode
from trainer.layer import losses
from trainer.layer.bias import with_one
from trainer.layer.compiled_answers import CompiledAnswers, NoEngine

if TYPE_CHECKING:
    from service.engine import Engine

SMALLEST_GATE = torch.finfo(torch.float32).tiny
SEARCHED_AT_ONCE = 2**24  # scores over all classes that are in memory together


class Output(NamedTuple):
    output: Tensor  # [B] log-probability of each row's target
    loss: Tensor  # [] mean negative log-probability


class Routing(NamedTuple):
    """Which expert each query row goes to, and its gate value there."""

    expert: Tensor  # [B]
    gate: Tensor  # [B] softmax(U h) at that expert, not renormalised


class Teacher(NamedTuple):
    """A full softmax to learn from."""

    head: Tensor  # [N,D], or [N,D+1] for a layer with biases
    logsumexp: Tensor  # [B] of its logits, for the query rows of the batch
    weight: float  # of its distribution; the rest goes to the label


class TopK(NamedTuple):
    classes: Tensor  # [B,k]
    log_probs: Tensor  # [B,k]


class DSSoftmax(nn.Module):
    """A sparse mixture of sparse experts in place of a softmax's linear layer.

    A gate picks one expert; only the classes that expert still holds are scored. The verbs are
    those of `torch.nn.AdaptiveLogSoftmaxWithLoss`, plus `topk`. Called without a target it stands
    in for the linear layer: it gives log-probabilities of all classes, which serve as logits.

    Only kept weight rows are in memory: each of `experts` is a matrix with one row for each class
    it has not pruned, and `keys` names the (expert, class) pair of every row. A pruned class has
    logit 0, so its probability is positive, and N - V absent classes add N - V to the normaliser.

    Args:
        in_features: D, the size of a hidden vector
        n_classes: N
        n_experts: K
        gate_noise: standard deviation of Gaussian noise on the gate's logits while training
        keys: the (expert, class) pairs to hold, ascending, each as expert * N + class; all if None
        biased: gate and experts have biases, in one more column: [K, D+1] and [V, D+1]

    Shape:
        - hidden: [B, D]
        - target: [B], class ids
        - output: [B]; loss: scalar; log_prob: [B, N]; predict: [B]; topk: [B, k]
        - without a target: hidden [..., D] to log-probabilities [..., N]
    """

    keys: Tensor

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        n_experts: int,
        gate_noise: float = 0.0,
        keys: Tensor | None = None,
        biased: bool = False,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.n_classes = n_classes
        self.n_experts = n_experts
        self.gate_noise = gate_noise
        self.biased = biased
        self._compiled: CompiledAnswers | None = None
        keys = torch.arange(n_experts * n_classes) if keys is None else keys
        self.register_buffer("keys", keys)  # [R]
        columns = in_features + biased
        self.gate = nn.Parameter(torch.empty(n_experts, columns))
        sizes = torch.bincount(keys // n_classes, minlength=n_experts).tolist()
        self.experts = nn.ParameterList(torch.empty(size, columns) for size in sizes)
        self.reset_parameters()

    @staticmethod
    def from_bundle(path: str | Path) -> "DSSoftmax":
        """The layer of a bundle, for use as a model's head: it answers as the service does."""
        from trainer.layer.from_bundle import layer_from_bundle

        return layer_from_bundle(Path(path))

    def answer_by(self, engine: "Engine", bundle: Path) -> None:
        """Has `topk` answered by the engine of the layer's bundle until a weight changes."""
        self._compiled = CompiledAnswers(engine, bundle, self)

    @property
    def compiled(self) -> CompiledAnswers | None:
        """What answers `topk` for as long as the layer is its bundle's."""
        unchanged = self._compiled is not None and self._compiled.fits(self)
        return self._compiled if unchanged else None

    def save_pretrained(self, folder: str | Path) -> None:
        """Saves the layer in a new folder: as the bundle that it was loaded from, while its weights
        are as they were; else as arrays and a JSON document, which no server can load."""
        from trainer.layer.pretrained import save

        save(self, Path(folder))

    @staticmethod
    def from_pretrained(folder: str | Path) -> "DSSoftmax":
        """The layer that `save_pretrained` saved. No code in the folder is run."""
        from trainer.layer.pretrained import load

        return load(Path(folder))

    def __getstate__(self) -> dict[str, object]:
        # A copy has weights of its own, and an engine cannot be saved.
        return self.__dict__ | {"_compiled": None}

    def reset_parameters(self) -> None:
        bound = self.in_features**-0.5
        nn.init.uniform_(self.gate, -bound, bound)
        for weight in self.experts:
            nn.init.uniform_(weight, -bound, bound)

    # --- biases -------------------------------------------------------------------------------

    def extended(self, hidden: Tensor) -> Tensor:
        """Hidden vectors [b,D] as gate and experts multiply them: with a 1 for the bias, if any."""
        return with_one(hidden) if self.biased else hidden

    def split_bias(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weights [V,D] and the biases [V] of a matrix of this layer, as views of it."""
        return (matrix[:, :-1], matrix[:, -1]) if self.biased else (matrix, None)

    # --- which weight rows are kept -----------------------------------------------------------

    @property
    def expert_of_row(self) -> Tensor:
        return self.keys // self.n_classes  # [R]

    @property
    def class_of_row(self) -> Tensor:
        return self.keys % self.n_classes  # [R]

    @property
    def expert_sizes(self) -> list[int]:
        return [len(weight) for weight in self.experts]

    @property
    def weight(self) -> Tensor:
        """A copy of all weight rows, in the order of `keys`."""
        return torch.cat([weight.detach() for weight in self.experts])  # [R,D]

    def row_squares(self) -> Tensor:
        """The mean square of each weight row, from which the group lassos are computed."""
        return torch.cat([losses.row_squares(weight) for weight in self.experts])  # [R]

    def row_of(self, expert: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Where each (expert, class) pair is stored, and whether it is: [B], [B] bool."""
        wanted = expert * self.n_classes + target
        row = torch.searchsorted(self.keys, wanted)  # R where it would come after the last
        past_the_end = self.keys.new_full((1,), -1)
        return row, torch.cat([self.keys, past_the_end])[row] == wanted

    def keep_rows(self, kept: Tensor) -> None:
        """Drop weight rows whose entry in the [R] mask is False. The experts are new parameters."""
        masks = kept.split(self.expert_sizes)
        for number, mask in enumerate(masks):
            self.experts[number] = nn.Parameter(self.experts[number].data[mask])
        self.keys = self.keys[kept]

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:  # type: ignore[type-arg]
        # A checkpoint may hold fewer rows than a new layer does.
        if f"{prefix}keys" in state_dict:
            self.keys = torch.empty_like(state_dict[f"{prefix}keys"])
            for number in range(self.n_experts):
                saved = state_dict[f"{prefix}experts.{number}"]
                self.experts[number] = nn.Parameter(torch.empty_like(saved))
        super()._load_from_state_dict(state_dict, prefix, *args)

    # --- the sparse gate ----------------------------------------------------------------------

    def route(self, hidden: Tensor) -> Routing:
        logits = self._logits(hidden, self.gate)  # [B,K]
        if self.training and self.gate_noise:
            logits = logits + self.gate_noise * torch.randn_like(logits)
        gate, expert = torch.softmax(logits, dim=1).max(dim=1)  # gradient reaches all of U
        return Routing(expert, gate)

    # --- the sparse experts -------------------------------------------------------------------

    def _logits(self, hidden: Tensor, matrix: Tensor) -> Tensor:
        """Query rows [b,D] times a matrix's rows [V,D], or [V,D+1] with biases: [b,V]."""
        return self.extended(hidden) @ matrix.T

    def _scored_groups(
        self, hidden: Tensor, expert: Tensor, gate: Tensor, k: int | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """For each expert in use: its number, its query rows [b], gate * W h [b,V], log Z [b]."""
        order = torch.argsort(expert, stable=True)  # [B]
        counts = torch.bincount(expert, minlength=self.n_experts).tolist()
        for number, rows in enumerate(order.split(counts)):
            if len(rows):
                yield number, rows, *self._scores(number, hidden[rows], gate[rows], k)

    def _scores(
        self, number: int, hidden: Tensor, gate: Tensor, k: int | None
    ) -> tuple[Tensor, Tensor]:
        """An expert's gate * W h [b,V] and log Z [b].

        With a k only the k best are needed: a subclass may return -inf for the others.
        """
        del k
        scores = gate[:, None] * self._logits(hidden, self.experts[number])  # [b,V]
        return scores, self._logsumexp(scores)

    def _logsumexp(self, scores: Tensor) -> Tensor:
        present = scores.logsumexp(dim=1)  # [b]; -inf for an expert without classes
        absent = self.n_classes - scores.shape[1]
        if not absent:
            return present
        return torch.logaddexp(present, present.new_tensor(absent).log())

    def forward(
        self, hidden: Tensor, target: Tensor | None = None, routing: Routing | None = None
    ) -> Output | Tensor:
        """Log-probabilities and loss of the targets; without any, log-probabilities of all classes.

        The latter for hidden of any shape [..., D], and of any precision.
        """
        if target is None:
            rows = hidden.reshape(-1, hidden.shape[-1]).to(self.gate.dtype)  # [B,D]
            return self.log_prob(rows).reshape(*hidden.shape[:-1], self.n_classes)
        if len(target) and not 0 <= target.min() <= target.max() < self.n_classes:
            raise ValueError(f"target values must be in 0..{self.n_classes - 1}")
        expert, gate = routing if routing is not None else self.route(hidden)
        row, held = self.row_of(expert, target)  # [B], [B]
        first_row = [0, *accumulate(self.expert_sizes)]
        order, outputs = [], []
        for number, rows, scores, logsumexp in self._scored_groups(hidden, expert, gate):
            if scores.shape[1]:
                position = (row[rows] - first_row[number]).clamp(0, scores.shape[1] - 1)
                score = scores.gather(1, position[:, None])[:, 0]
                outputs.append(torch.where(held[rows], score, 0.0) - logsumexp)
            else:
                outputs.append(-logsumexp)
            order.append(rows)
        output = torch.cat(outputs)[torch.argsort(torch.cat(order))]  # [B]
        return Output(output, -output.mean())

    def distillation_loss(
        self,
        hidden: Tensor,
        target: Tensor,
        teacher: Teacher,
        routing: Routing | None = None,
    ) -> Tensor:
        """Cross-entropy [B] against the labels, mixed with a full softmax's distribution.

        The teacher scores only the classes that a query row's expert holds: absent classes have
        score 0 in this layer, so they count in its normaliser alone.
        """
        expert, gate = routing if routing is not None else self.route(hidden)
        classes = self.class_of_row.split(self.expert_sizes)
        order, losses_of_rows = [], []
        for number, rows, scores, logsumexp in self._scored_groups(hidden, expert, gate):
            with torch.no_grad():
                logits = self._logits(hidden[rows], teacher.head[classes[number]])  # [b,V]
                wanted = teacher.weight * (logits - teacher.logsumexp[rows, None]).exp()
                wanted += (1 - teacher.weight) * (target[rows, None] == classes[number])
            losses_of_rows.append(logsumexp - (wanted * scores).sum(dim=1))
            order.append(rows)
        return torch.cat(losses_of_rows)[torch.argsort(torch.cat(order))]

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all N classes under each row's expert: [B,N]."""
        expert, gate = self.route(hidden)
        result = hidden.new_zeros(len(hidden), self.n_classes)
        for number, rows, scores, logsumexp in self._scored_groups(hidden, expert, gate):
            classes = self.class_of_row[self.expert_of_row == number]
            dense = scores.new_zeros(len(rows), self.n_classes)
            dense = dense.index_copy(1, classes, scores) - logsumexp[:, None]
            result = result.index_copy(0, rows, dense)
        return result

    def predict(self, hidden: Tensor) -> Tensor:
        """The most probable class that each row's expert holds: [B]."""
        return self.topk(hidden, 1).classes[:, 0]

    @torch.no_grad()
    def rank_of(self, hidden: Tensor, target: Tensor) -> Tensor:
        """How many classes of a row's expert score above its target, N if it is not held: [B]."""
        expert, gate = self.route(hidden)
        row, held = self.row_of(expert, target)
        first_row = [0, *accumulate(self.expert_sizes)]
        rank = torch.full((len(hidden),), self.n_classes, device=hidden.device)
        for number, rows, scores, _ in self._scored_groups(hidden, expert, gate):
            here = held[rows]
            own = scores[here].gather(1, row[rows[here], None] - first_row[number])  # [h,1]
            rank[rows[here]] = (scores[here] > own).sum(dim=1)
        return rank

    @torch.no_grad()
    def searched(self, hidden: Tensor, k: int, experts: int = 1) -> Tensor:
        """Log-probabilities [B,N] of the classes searched for a top-k answer, -inf for the others.

        The best gate value is the query row's inverse temperature in every expert searched; a
        lower-ranked expert's log-probabilities are lowered by the log of the ratio of gate values.
        For query rows with fewer than k classes the next-best experts are searched too.
        """
        reachable = len(self.class_of_row.unique())
        if not 1 <= k <= reachable:
            raise ValueError(f"k must be in 1..{reachable}, the number of classes held")
        if not 1 <= experts <= self.n_experts:
            raise ValueError(f"experts must be in 1..{self.n_experts}")
        logits = self._logits(hidden, self.gate)  # [B,K]
        # By logit: gates far behind the best underflow to equal zeros.
        ranked = logits.sort(dim=1, descending=True, stable=True).indices  # [B,K]
        gates = torch.softmax(logits, dim=1).gather(1, ranked).clamp_min(SMALLEST_GATE)
        best = hidden.new_full((len(hidden), self.n_classes), -torch.inf)  # [B,N]
        for rank in range(self.n_experts):
            searched = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
            if rank >= experts:
                searched = best.isfinite().sum(1) < k
            todo = searched.nonzero()[:, 0]
            if not len(todo):
                break
            penalty = (gates[todo, rank] / gates[todo, 0]).log()
            groups = self._scored_groups(hidden[todo], ranked[todo, rank], gates[todo, 0], k)
            for number, rows, scores, logsumexp in groups:
                classes = self.class_of_row[self.expert_of_row == number]
                found = scores - logsumexp[:, None] + penalty[rows, None]  # [b,V]
                where = todo[rows][:, None], classes[None, :]
                best[where] = torch.maximum(best[where], found)
        return best

    def topk(
        self,
        hidden: Tensor,
        k: int,
        experts: int = 1,
        *,
        exact: bool = False,
        recall: float | None = None,
    ) -> TopK:
        """The k most probable classes of each row, searched in its `experts` best experts.

        The engine of the layer's bundle can also give the output layer's own k best (`exact`), or
        a share of them that was promised (`recall`).
        """
        hidden = hidden.detach().to(self.gate.dtype)
        mode, compiled = Mode(exact, recall), self.compiled
        if compiled is not None and len(hidden) and hidden.device.type == "cpu":
            return TopK(*compiled.topk(hidden, k, experts, mode))
        if mode != SPARSE:
            raise NoEngine
        best = self.searched(hidden, k, experts)
        log_probs, classes = best.sort(dim=1, descending=True, stable=True)  # ties by class id
        return TopK(classes[:, :k], log_probs[:, :k])

    @torch.no_grad()
    def first_classes(self, hidden: Tensor, k: int) -> Tensor:
        """The classes [B,k] of `topk`, which are found in each row's expert alone.

        Only for rows whose expert holds fewer than k are all N classes looked at.
        """
        found = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
        classes = self.class_of_row.split(self.expert_sizes)
        short = []
        for number, rows, scores, _ in self._scored_groups(hidden, *self.route(hidden), k):
            if scores.shape[1] < k:
                short += rows.split(max(1, SEARCHED_AT_ONCE // self.n_classes))
            else:
                found[rows] = classes[number][scores.topk(k, dim=1).indices]
        for rows in short:
            found[rows] = self.topk(hidden[rows], k).classes
        return found
