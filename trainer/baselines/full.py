"""The full softmax: one linear layer over all classes, trained as the doubly sparse layer is."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from service.terminal import progress
from trainer.training.config import TrainConfig
from trainer.training.loop import Data, epoch_batches
from trainer.training.metrics import chunks
from trainer.training.optimizer import make_optimizer


def full_softmax_accuracy(
    config: TrainConfig,
    encoder: nn.Module,
    hidden_size: int,
    n_classes: int,
    training: Data,
    test: Data,
) -> float:
    """Train with the same optimizer, batches and epochs; returns the accuracy on the test rows."""
    model = nn.Sequential(encoder, nn.Linear(hidden_size, n_classes, bias=False))
    optimizer = make_optimizer(config, model)
    model.train()
    for epoch in progress.each(range(config.epochs), "full softmax"):
        n_rows = len(training.labels)
        for rows in epoch_batches(n_rows, config.batch_size, config.seed, epoch):
            loss = cross_entropy(model(training.inputs[rows]), training.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    hits = 0
    with torch.no_grad():
        for part in chunks(len(test.labels)):
            hits += int((model(test.inputs[part]).argmax(1) == test.labels[part]).sum())
    return hits / len(test.labels)
