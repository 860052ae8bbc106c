"""The gate learns where a row's answers are, and what it costs to look there."""

import torch

from trainer.training.fidelity.gate import learn_gate
from trainer.training.fidelity.teacher import Answers


def learned(held: torch.Tensor, cost: torch.Tensor) -> torch.Tensor:
    """The share of rows that each of two experts gets, from a gate that does not care at first."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.nn.functional.pad(torch.randn(4096, 3, generator=generator), (0, 1), value=1.0)
    answers = Answers(
        torch.tensor([[0, 1]]).repeat(4096, 1).int(), torch.zeros(4096, 2), inputs[:, 0]
    )
    gate = learn_gate(
        torch.zeros(2, 4), inputs, answers, torch.ones(4096, 2), held, cost,
        epochs=10, learning_rate=0.05, seed=0,
    )  # fmt: skip
    return torch.bincount((inputs @ gate.T).argmax(dim=1), minlength=2) / 4096


def test_rows_go_where_their_answers_are() -> None:
    half, all_of_them = torch.tensor([[True, False], [True, True]])
    assert learned(torch.stack([half, all_of_them]), torch.zeros(2))[1] > 0.95


def test_of_experts_that_hold_the_same_the_cheaper_one_is_chosen() -> None:
    both = torch.ones(2, 2, dtype=torch.bool)
    assert learned(both, torch.tensor([0.3, 0.1]))[1] > 0.95
    assert learned(both, torch.tensor([0.1, 0.3]))[0] > 0.95


def test_answers_that_cost_more_than_they_are_worth_are_left() -> None:
    held = torch.tensor([[True, False], [True, True]])
    assert learned(held, torch.tensor([0.0, 0.8]))[0] > 0.95
