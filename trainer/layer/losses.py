"""The terms of the objective, one function per equation. Coefficients are applied by the caller.

K experts, N classes, R weight rows, D hidden, B query rows of the batch, J sampled classes.
"""

import math

import torch
from torch import Tensor

# Inside the square roots, so that a row of zeros has a gradient.
EPSILON = 1e-8


def task(log_prob: Tensor) -> Tensor:
    """L_task: mean negative log-probability of the targets, from their log-probabilities [B]."""
    return -log_prob.mean()


def row_squares(weight: Tensor) -> Tensor:
    """The mean square of each weight row, [R,D] -> [R], from which the group lassos are computed.

    The mean and not the sum, as in the authors' code: a coefficient and a threshold then mean
    the same at every D.
    """
    return torch.linalg.vector_norm(weight, dim=1).square() / weight.shape[1]


def class_lasso(squares: Tensor) -> Tensor:
    """L_lasso: sum over experts and classes of ||W_c^(k)||."""
    return (squares + EPSILON).sqrt().sum()


def expert_lasso_printed(squares: Tensor, expert_of_row: Tensor, n_experts: int) -> Tensor:
    """L_expert as the paper prints it: sum over experts of sqrt(sum over classes ||W_c^(k)||^2)."""
    return _grouped(squares, expert_of_row, n_experts)


def expert_lasso_coded(squares: Tensor, class_of_row: Tensor, n_classes: int) -> Tensor:
    """L_expert as the authors coded it: sum over classes of sqrt(sum over experts ||W_c^(k)||^2).

    This is the form that pushes a class out of all experts but a few.
    """
    return _grouped(squares, class_of_row, n_classes)


def _grouped(squares: Tensor, group: Tensor, n_groups: int) -> Tensor:
    sums = squares.new_zeros(n_groups).index_add(0, group, squares)
    return (sums + EPSILON).sqrt().sum()


def load_balance(gate: Tensor, expert: Tensor, n_experts: int) -> Tensor:
    """L_load: CV^2 over experts of the batch's summed gate values."""
    load = gate.new_zeros(n_experts).index_add(0, expert, gate)  # [K]
    return load.var(unbiased=False) / (load.mean().square() + EPSILON)


def sampled_loss(
    rows: Tensor, labels: Tensor, head: Tensor, proposal: Tensor, n_samples: int
) -> Tensor:
    """Cross entropy with the softmax's denominator estimated from J classes drawn for all rows.

    A drawn class counts 1 / (J q), the label itself exactly once; so the estimate is unbiased.
    """
    drawn = torch.multinomial(proposal, n_samples, replacement=True)  # [J]
    share = proposal / proposal.sum()
    others = rows @ head[drawn].T - (n_samples * share[drawn]).log().float()  # [B,J]
    others = others.masked_fill(drawn == labels[:, None], -math.inf)
    own = (rows * head[labels]).sum(1)  # [B]
    return (torch.cat([own[:, None], others], 1).logsumexp(1) - own).mean()
