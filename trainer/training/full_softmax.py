"""A full softmax for vectors that come without one: everything else learns from it.

M rows, D hidden, N classes.
"""

import math
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from service.terminal import progress
from trainer.tasks.language_model.encoder_training import EncoderConfig, sampled_loss
from trainer.training.config import VectorsConfig
from trainer.training.loop import Interrupted, Rows, epoch_batches, stop_requests

BATCH = 1000
LEARNING_RATE = 0.003  # falls linearly to nothing


def fitted_head(
    config: VectorsConfig, inputs: Rows, labels: Tensor, n_classes: int, file: Path
) -> Tensor:
    """Rows [N,D] learned from the labels alone; kept in the run, so that it is done once."""
    if not file.exists():
        weight = fit(config, inputs, labels, n_classes)
        temporary = file.with_name(f"partial-{file.name}")
        np.save(temporary, weight.numpy())
        temporary.replace(file)
    return torch.from_numpy(np.load(file, allow_pickle=False))


def fit(config: VectorsConfig, inputs: Rows, labels: Tensor, n_classes: int) -> Tensor:
    sampling = EncoderConfig()  # with very many classes the softmax is estimated, as for encoders
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
            if n_classes > sampling.sample_above:
                loss = sampled_loss(hidden, labels[rows], weight, proposal, sampling.samples)
            else:
                loss = cross_entropy(hidden @ weight.T, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bar.advance()
            if stopped():
                raise Interrupted("Stopped before the full softmax was there: resume the run.")
    return weight.detach()
