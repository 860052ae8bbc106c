"""Each equation against numbers worked by hand."""

import pytest
import torch

from trainer.layer import losses

# Two experts, three classes, two hidden units. Rows by (expert, class):
# (0,0) = 3,4   (0,2) = 0,0   (1,0) = 6,8   (1,1) = 0,5
WEIGHT = torch.tensor([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0], [0.0, 5.0]])
EXPERT = torch.tensor([0, 0, 1, 1])
CLASS = torch.tensor([0, 2, 0, 1])
# Mean squares over the two units: 25/2, 0, 100/2, 25/2.
ROOT2 = 2**0.5


def test_task_is_the_mean_negative_log_probability() -> None:
    assert losses.task(torch.tensor([-1.0, -3.0])).item() == pytest.approx(2.0)


def test_class_lasso_sums_row_norms() -> None:
    squares = losses.row_squares(WEIGHT)
    assert losses.class_lasso(squares).item() == pytest.approx((5 + 0 + 10 + 5) / ROOT2, rel=1e-4)


def test_printed_expert_lasso_groups_by_expert() -> None:
    squares = losses.row_squares(WEIGHT)
    expected = (25**0.5 + 125**0.5) / ROOT2
    found = losses.expert_lasso_printed(squares, EXPERT, n_experts=2)
    assert found.item() == pytest.approx(expected, rel=1e-4)


def test_coded_expert_lasso_groups_by_class_across_experts() -> None:
    squares = losses.row_squares(WEIGHT)
    expected = (125**0.5 + 25**0.5 + 0) / ROOT2
    found = losses.expert_lasso_coded(squares, CLASS, n_classes=3)
    assert found.item() == pytest.approx(expected, rel=1e-3)


def test_coded_expert_lasso_charges_two_rows_of_a_class_less_than_rows_of_two_classes() -> None:
    """A group is a class across experts: sqrt(a + b) < sqrt(a) + sqrt(b)."""
    together = losses.expert_lasso_coded(torch.tensor([4.0, 4.0]), torch.tensor([0, 0]), 2)
    apart = losses.expert_lasso_coded(torch.tensor([4.0, 4.0]), torch.tensor([0, 1]), 2)
    assert together < apart


def test_load_balance_is_the_squared_coefficient_of_variation() -> None:
    gate = torch.tensor([0.5, 0.25, 0.25, 1.0])
    expert = torch.tensor([0, 1, 1, 0])
    # loads 1.5, 0.5, 0: mean 2/3, variance ((5/6)^2 + (1/6)^2 + (2/3)^2) / 3
    expected = ((5 / 6) ** 2 + (1 / 6) ** 2 + (2 / 3) ** 2) / 3 / (2 / 3) ** 2
    assert losses.load_balance(gate, expert, 3).item() == pytest.approx(expected, rel=1e-5)


def test_load_balance_is_zero_when_balanced() -> None:
    found = losses.load_balance(torch.full((6,), 0.5), torch.arange(6) % 3, 3)
    assert found.item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("grouping", ["class", "printed", "coded"])
def test_gradients_equal_finite_differences_and_exist_at_zero(grouping: str) -> None:
    def lasso(weight: torch.Tensor) -> torch.Tensor:
        squares = losses.row_squares(weight)
        if grouping == "class":
            return losses.class_lasso(squares)
        if grouping == "printed":
            return losses.expert_lasso_printed(squares, EXPERT, 2)
        return losses.expert_lasso_coded(squares, CLASS, 3)

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lasso, weight)
    zeros = torch.zeros(4, 2, requires_grad=True)
    lasso(zeros).backward()
    assert torch.equal(zeros.grad, torch.zeros(4, 2))


def test_load_balance_gradient_equals_finite_differences() -> None:
    gate = torch.rand(8, dtype=torch.float64, requires_grad=True)
    expert = torch.arange(8) % 3
    assert torch.autograd.gradcheck(lambda g: losses.load_balance(g, expert, 3), gate)
