"""A model during a capture: finds its head, records the head's inputs, leaves it unchanged.

D hidden, N classes.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from service.errors import DSSError
from trainer.layer import DSSoftmax

NAMED = 8  # modules that are listed where a head is not found


class HeadMissing(DSSError):
    pass


class HeadUnsuitable(DSSError):
    pass


class HeadNotCalled(DSSError):
    pass


class HeadCalledAgain(DSSError):
    pass


# --- the head ---------------------------------------------------------------------------------


@dataclass
class Head:
    """A model's output layer, and its inputs in the current forward pass."""

    name: str
    module: nn.Module
    weight: Tensor  # [N,D]
    bias: Tensor | None  # [N]
    given: list[Tensor] = field(default_factory=list)  # [..., D] for each call

    def take(self) -> Tensor:
        """What the head was given in one forward pass, [..., D]."""
        given, self.given = self.given, []
        if not given:
            raise HeadNotCalled(f"The forward pass does not use {self._says()}.")
        if len(given) > 1:
            raise HeadCalledAgain(
                f"{self.name} is called {len(given)} times in a forward pass; give a forward= that"
                " calls it once."
            )
        width = self.weight.shape[1]
        if given[0].shape[-1] != width:
            raise HeadUnsuitable(
                f"{self.name} is given vectors of {given[0].shape[-1]} numbers, but its rows have"
                f" {width}."
            )
        return given[0]

    def _says(self) -> str:
        if not isinstance(self.module, nn.Embedding):
            return f"{self.name} (a compiled model may hide it: give the one before compiling)"
        return f"the rows of {self.name} in torch.nn.functional.linear; name the output layer"

    def arrays(self) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        return _array(self.weight), None if self.bias is None else _array(self.bias)


def _array(tensor: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return found


def find_head(model: nn.Module, head: str | nn.Module) -> Head:
    modules = dict(model.named_modules(remove_duplicate=False))
    if isinstance(head, str):
        if not head or head not in modules:
            raise HeadMissing(f"The model has no module {head!r}{_suggested(head, modules)}")
        name, module = head, modules[head]
    else:
        names = [name for name, module in modules.items() if module is head]
        if not names:
            raise HeadMissing(
                f"The head is a {type(head).__name__} that the model does not hold"
                f"{_suggested('', modules)}"
            )
        name, module = names[0], head
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(module, DSSoftmax):
        raise HeadUnsuitable(f"{name} is a sparse layer already; put the full one in its place.")
    if (
        not isinstance(weight, Tensor)
        or weight.ndim != 2
        or not weight.is_floating_point()  # quantised
        or weight.is_meta  # kept elsewhere
    ):
        raise HeadUnsuitable(
            f"{name} is a {type(module).__name__} without a plain matrix `weight` of a row for each"
            f" class{_suggested('', modules)}"
        )
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]):
        raise HeadUnsuitable(f"The bias of {name} has not one number for each of its rows.")
    return Head(name, module, weight, bias)


def _suggested(name: str, modules: dict[str, nn.Module]) -> str:
    """The nearest names, and the largest linear layers with their sizes."""
    linear = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    largest = sorted(linear, key=lambda name: -linear[name].out_features)[:NAMED]
    sizes = ", ".join(
        f"{name} ({linear[name].in_features} to {linear[name].out_features})" for name in largest
    )
    near = get_close_matches(name, [known for known in modules if known], n=3)
    return (
        (f"; near it are {', '.join(near)}" if near else "")
        + (f"; its linear layers are {sizes}" if sizes else "; it has no linear layer")
        + ("." if len(linear) <= NAMED else f" and {len(linear) - NAMED} smaller ones.")
    )


@contextmanager
def watched(head: Head) -> Iterator[None]:
    """Records the inputs of the head in `head.given`.

    The head itself does not run: the model gets zeros for logits. With many classes the head is
    most of the work, and its logits are not used.
    """
    if isinstance(head.module, nn.Embedding):  # its rows are used, not the module
        with _UsedRows(head):
            yield
        return
    own = head.module.__dict__.get("forward")

    def forward(*args: Tensor, **kwargs: Tensor) -> Tensor:
        hidden, *_ = *args, *kwargs.values()
        return _recorded(head, hidden)

    head.module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del head.module.__dict__["forward"]
        if own is not None:
            head.module.__dict__["forward"] = own


class _UsedRows(TorchFunctionMode):
    """Sees `linear(hidden, embedding.weight, bias)`."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self._head = head

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        del types
        kwargs = kwargs or {}
        if func == F.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            if given["weight"] is self._head.weight:
                self._head.bias = given.get("bias")
                return _recorded(self._head, given["input"])
        return func(*args, **kwargs)


def _recorded(head: Head, hidden: Tensor) -> Tensor:
    head.given.append(hidden.clone())
    # A copy, and not one zero for all logits: a model may write to either.
    return hidden.new_zeros(*hidden.shape[:-1], len(head.weight))


# --- leaving the model as it was ----------------------------------------------------------------


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Sets eval mode without gradients, and afterwards restores everything, also after a failure.

    Flags are set one by one, since `eval()` may be a method that does more, and parts of a model
    in training may be frozen.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    random = torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                _put_back(module, name, buffer, before)
        torch.set_rng_state(random)
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)


def _put_back(module: nn.Module, name: str, buffer: Tensor, before: Tensor) -> None:
    now = module._buffers.get(name)
    if now is None or now.shape != before.shape or now.dtype != before.dtype:
        return  # a table that has grown with longer inputs: the module relies on its new size
    module._buffers[name] = buffer
    if not torch.equal(buffer, before):
        buffer.copy_(before)


def fingerprint(model: nn.Module) -> str:
    """Differs for a model with other weights. Sums of bytes are exact in any order."""
    facts = {
        name: [list(value.shape), str(value.dtype), _sum_of_bytes(value)]
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _sum_of_bytes(tensor: Tensor) -> int:
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return int(plain.sum(dtype=torch.int64))
