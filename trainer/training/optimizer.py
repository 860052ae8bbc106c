"""Adam, and how its learning rate falls while a run goes on."""

import torch
from torch import nn

from trainer.training.config import TrainConfig


def make_optimizer(config: TrainConfig, *modules: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    betas = (0.9, config.beta2)
    return torch.optim.Adam(parameters, lr=config.learning_rate, betas=betas, fused=True)


def set_learning_rate(config: TrainConfig, optimizer: torch.optim.Optimizer, epoch: float) -> None:
    """From the learning rate linearly down to its `learning_rate_end` share."""
    done = epoch / config.epochs
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * (1 - done * (1 - config.learning_rate_end))
