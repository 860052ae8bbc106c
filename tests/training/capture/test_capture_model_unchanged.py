"""A capture leaves the model as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training.toy_models import Images, Tied, Words, photographs, sentences
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainer import capture


def everything(model: nn.Module) -> dict[str, Any]:
    """All that a capture could change."""
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "same tensors": [id(value) for value in (*model.parameters(), *model.buffers())],
        "modes": [module.training for module in model.modules()],
        "needs": [parameter.requires_grad for parameter in model.parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [
            (len(module._forward_hooks), len(module._forward_pre_hooks))
            for module in model.modules()
        ],
        "random": torch.get_rng_state(),
        "gradients": torch.is_grad_enabled(),
    }


def assert_same(before: object, after: object) -> None:
    if isinstance(before, dict) and isinstance(after, dict):
        assert before.keys() == after.keys()
        for name in before:
            assert_same(before[name], after[name])
    elif isinstance(before, list) and isinstance(after, list):
        assert len(before) == len(after)
        for one, other in zip(before, after, strict=True):
            assert_same(one, other)
    elif isinstance(before, Tensor) and isinstance(after, Tensor):
        assert torch.equal(before, after)
    else:
        assert before == after


def model_in_training() -> Images:
    torch.manual_seed(0)
    model = Images()
    model(torch.randn(5, 1, 8, 8)).sum().backward()
    model.features[1].eval()  # a frozen part
    model.features[0].weight.requires_grad_(False)
    model.fc.register_forward_hook(lambda *_: None)
    return model


def test_a_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = model_in_training()
    before = everything(model)
    loader = DataLoader(TensorDataset(*(map(torch.cat, zip(*photographs(3), strict=True)))), 4)
    capture(model, "fc", loader, tmp_path)
    assert_same(before, everything(model))


@pytest.mark.parametrize("head", ["fc", "embedding"])
def test_a_model_is_left_as_it_was_by_a_failure(tmp_path: Path, head: str) -> None:
    def batches() -> Any:  # noqa: ANN401
        yield from photographs(2) if head == "fc" else sentences(2)
        torch.randn(3)
        raise KeyboardInterrupt

    model = model_in_training() if head == "fc" else Tied()
    before = everything(model)
    with pytest.raises(KeyboardInterrupt):
        capture(model, head, batches(), tmp_path)
    assert_same(before, everything(model))


def test_a_table_that_grows_is_not_shrunk(tmp_path: Path) -> None:
    """A module that has grown its buffer counts on it by flags of its own."""

    class Growing(Words):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(2))

        def forward(self, tokens: Tensor, state: object = None) -> tuple[Tensor, object]:
            self.table = torch.zeros(tokens.shape[1])
            return super().forward(tokens, state)

    model = Growing()
    capture(model, "head", sentences(1), tmp_path)
    assert len(model.table) == 7
