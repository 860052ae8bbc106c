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
TEMPERATURE = 0.02  # differences of an expert's value, of a row's whole worth, that count as large


def learn_gate(
    gate: Tensor,
    inputs: Tensor,
    answers: Answers,
    worth: Tensor,
    held: Tensor,
    cost: Tensor,
    *,
    epochs: int,
    learning_rate: float,
    seed: int,
) -> Tensor:
    """A gate [K,D] on inputs [S,D], given which classes each expert holds, [K,N] bool, and what it
    costs to search an expert [K], in shares of a row's worth.

    An expert's value to a row is the share of the worth of the row's answers that it holds, less
    its cost. The loss is a smooth mean of the values under the gate: it is least where the gate is
    sure of the best expert, and rows that any of several experts answers well move little.
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
                value = (covered - cost) / TEMPERATURE  # [B,K]
                log_gate = log_softmax(inputs[rows] @ gate.T, dim=1)  # [B,K]
                loss = -(log_gate + value).logsumexp(dim=1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                bar.advance()
    return gate.detach()
