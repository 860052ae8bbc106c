"""The full softmax that a layer learns from: fitted where none is given, and its normalisers.

M query rows, D hidden, N classes, b query rows scored at once.
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
from trainer.layer.bias import with_one
from trainer.layer.losses import sampled_loss
from trainer.training.config import SAMPLE_ABOVE, SAMPLES, VectorsConfig
from trainer.training.loop import Interrupted, epoch_batches, stop_requests

BATCH = 1000
SCORED_AT_ONCE = 128  # query rows whose logits over all classes stay in the cache
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
    # Both are allocated once: small results between large products would fragment memory.
    logits = torch.empty(SCORED_AT_ONCE, len(head))  # [b,N]
    found = torch.empty(n_rows)  # [M]
    for part in progress.each(list(chunks(n_rows, SCORED_AT_ONCE)), "full softmax"):
        hidden = rows[torch.arange(part.start, part.stop)]  # [b,D]
        if head.shape[1] > hidden.shape[1]:
            hidden = with_one(hidden)
        scored = torch.mm(hidden, head.T, out=logits[: len(hidden)])
        found[part] = scored.logsumexp(dim=1)
    temporary = file.with_name(f"partial-{file.name}")
    np.save(temporary, found.numpy())
    temporary.replace(file)
    return found
