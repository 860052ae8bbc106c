"""Learns a gate that names the experts which hold the head's answers.

B query rows of a batch, S query rows, D hidden, K experts, N classes, T answers of the head.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, log_softmax

from service.terminal import progress
from trainer.training.fidelity.teacher import Answers

BATCH = 2048
BETAS = (0.9, 0.99)
LEARNING_RATE_END = 0.05  # share that is left at the end
LEAST = 1e-3  # of a row's answers that any expert counts as holding


def learn_gate(
    gate: Tensor,
    inputs: Tensor,
    answers: Answers,
    worth: Tensor,
    held: Tensor,
    *,
    epochs: int,
    learning_rate: float,
    seed: int,
) -> Tensor:
    """A gate [K,D] on inputs [S,D], given which classes each expert holds, [K,N] bool.

    The loss is the negative log of the worth that a row's answers have in the experts, by their
    gate values: it is least where the gate is sure of an expert that holds all of them.
    """
    table = held.T.float().contiguous()  # [N,K]
    gate = gate.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([gate], lr=learning_rate, betas=BETAS, fused=True)
    generator = torch.Generator().manual_seed(seed)
    whole = worth.sum(dim=1, keepdim=True)
    n_steps = epochs * math.ceil(len(inputs) / BATCH)
    with progress.bar("gate", n_steps) as bar:
        for epoch in range(epochs):
            order = torch.randperm(len(inputs), generator=generator)
            for step, rows in enumerate(order.split(BATCH)):
                done = (epoch * math.ceil(len(inputs) / BATCH) + step) / n_steps
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate * (1 - done * (1 - LEARNING_RATE_END))
                covered = embedding_bag(
                    answers.classes[rows].long(),
                    table,
                    per_sample_weights=worth[rows] / whole[rows],
                    mode="sum",
                )  # [B,K]
                log_gate = log_softmax(inputs[rows] @ gate.T, dim=1)  # [B,K]
                loss = -(log_gate + (covered + LEAST).log()).logsumexp(dim=1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                bar.advance()
    return gate.detach()
