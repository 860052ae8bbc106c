"""The full softmax that a layer learns from: fitted where none is given, and its normalisers.

M query rows, D hidden, K experts, N classes, b query rows scored at once, J drawn classes.
"""

import math
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from service.terminal import progress
from trainer.data.arrays import chunks
from trainer.data.rows import Rows
from trainer.layer import DSSoftmax
from trainer.layer.bias import logits
from trainer.layer.losses import sampled_loss
from trainer.training.config import SAMPLE_ABOVE, SAMPLES, VectorsConfig
from trainer.training.head_answers import all_scores, destructive_logsumexp
from trainer.training.loop import Interrupted, epoch_batches, stop_requests

BATCH = 1000
ROWS_AT_ONCE = 2048
LEARNING_RATE = 0.003  # falls linearly to nothing


def fitted_head(
    config: VectorsConfig, inputs: Rows, labels: Tensor, n_classes: int, file: Path
) -> Tensor:
    """Weight rows [N,D] learned from the labels alone; a resumed run reads them from `file`."""
    if not file.exists():
        weight = fit(config, inputs, labels, n_classes)
        temporary = file.with_name(f"partial-{file.name}")
        np.save(temporary, weight.numpy())
        temporary.replace(file)
    return torch.from_numpy(np.load(file, allow_pickle=False))


def fit(config: VectorsConfig, inputs: Rows, labels: Tensor, n_classes: int) -> Tensor:
    proposal = torch.bincount(labels, minlength=n_classes).double() ** 0.75
    width = inputs[torch.arange(1)].shape[1]
    weight = torch.zeros(n_classes, width, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=LEARNING_RATE, fused=True)
    n_steps = config.head_epochs * math.ceil(len(labels) / BATCH)
    batches = chain.from_iterable(
        epoch_batches(len(labels), BATCH, config.seed, epoch) for epoch in range(config.head_epochs)
    )
    torch.manual_seed(config.seed)
    with stop_requests() as stopped, progress.bar("full softmax", n_steps) as bar:
        for step, rows in enumerate(batches):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / n_steps)
            hidden = inputs[rows]  # [B,D]
            if n_classes > SAMPLE_ABOVE:
                loss = sampled_loss(hidden, labels[rows], weight, proposal, SAMPLES)
            else:
                loss = cross_entropy(hidden @ weight.T, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bar.advance()
            if stopped():
                raise Interrupted("Stopped before the full softmax was trained: resume the run.")
    return weight.detach()


@torch.no_grad()
def full_normalisers(rows: Rows, n_rows: int, head: Tensor, file: Path) -> Tensor:
    """The full softmax's log-normaliser for every query row, [M]; computed once, kept in `file`.

    With it the teacher scores only the classes of a query row's expert, so epochs are cheap.
    """
    if file.exists():
        kept = np.load(file, allow_pickle=False)
        if len(kept) == n_rows:
            return torch.from_numpy(kept)
    found = torch.empty(n_rows)  # [M]
    for part, scores in all_scores(head, rows, n_rows, "full softmax"):
        found[part] = destructive_logsumexp(scores)
    temporary = file.with_name(f"partial-{file.name}")
    np.save(temporary, found.numpy())
    temporary.replace(file)
    return found


@torch.no_grad()
def estimated_normalisers(
    rows: Rows, n_rows: int, head: Tensor, layer: DSSoftmax, seed: int
) -> Tensor:
    """As `full_normalisers`, but exact only over the classes that a query row's expert holds.

    Those are the ones the full softmax finds most probable there. What all others add is estimated
    from J classes drawn for the run.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(head), (SAMPLES,), generator=generator)  # [J]
    weights = stands_for(layer, drawn)  # [K,J]
    own = [head[classes] for classes in layer.class_of_row.split(layer.expert_sizes)]  # [V,D] each
    found = torch.empty(n_rows)  # [M]
    for part in progress.each(list(chunks(n_rows, ROWS_AT_ONCE)), "full softmax, estimated"):
        hidden = rows[torch.arange(part.start, part.stop)]  # [b,D]
        expert = layer.route(hidden).expert  # [b]
        others = (logits(hidden, head[drawn]) + weights[expert]).logsumexp(dim=1)  # [b]
        held = torch.full_like(others, -torch.inf)
        for number in expert.unique().tolist():
            mine = (expert == number).nonzero()[:, 0]
            if len(own[number]):
                held[mine] = logits(hidden[mine], own[number]).logsumexp(dim=1)
        found[part] = torch.logaddexp(held, others)
    return found


def stands_for(layer: DSSoftmax, drawn: Tensor) -> Tensor:
    """The log of how many classes that an expert does not hold each drawn class stands for there,
    [K,J]; -inf if the expert holds it."""
    n_experts, n_classes = layer.n_experts, layer.n_classes
    expert = torch.arange(n_experts).repeat_interleave(len(drawn))
    held = layer.row_of(expert, drawn.repeat(n_experts))[1].view(n_experts, -1)  # [K,J]
    absent = n_classes - torch.tensor(layer.expert_sizes)  # [K]
    each = absent / (~held).sum(dim=1).clamp_min(1)
    return torch.where(held, -torch.inf, each.log()[:, None])
