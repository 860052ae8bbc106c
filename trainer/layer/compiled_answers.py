"""Answers a layer's top-k by the compiled engine of the bundle that it was loaded from.

B query rows, D hidden, k answers.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from service.errors import DSSError
from service.topk import Mode

if TYPE_CHECKING:
    from service.engine import Engine


class NoEngine(DSSError):
    """Only the engine of a layer's bundle gives exact and promised answers."""

    def __init__(self) -> None:
        super().__init__(
            "Exact and promised answers come from the engine of a layer's bundle, and this layer"
            " has none: it was not loaded from a bundle, or it was changed, moved or copied since;"
            " load it with DSSoftmax.from_bundle."
        )


class CompiledAnswers:
    """For as long as no weight of the layer is changed, replaced or moved.

    PyTorch counts changes of a tensor, but not those made around it: in `.data`, or in an array
    that shares its memory.
    """

    def __init__(self, engine: "Engine", bundle: Path, layer: nn.Module) -> None:
        self._engine = engine
        self.bundle = bundle
        self._weights = weights_of(layer)
        # Second names of the memory, which therefore no other tensor can take when one is moved.
        self._memory = [weight.detach() for weight in self._weights]
        self._versions = [weight._version for weight in self._weights]

    def fits(self, layer: nn.Module) -> bool:
        """Whether the engine answers as the layer does now."""
        own = weights_of(layer)
        if len(own) != len(self._weights):
            return False
        loaded = zip(own, self._weights, self._versions, self._memory, strict=True)
        return all(
            weight is known
            and weight._version == version
            and weight.data_ptr() == memory.data_ptr()
            for weight, known, version, memory in loaded
        )

    def topk(self, hidden: Tensor, k: int, experts: int, mode: Mode) -> tuple[Tensor, Tensor]:
        """Classes and log-probabilities, [B,k] each, of rows [B,D]."""
        answer = self._engine.topk(hidden.numpy(), k, experts, mode)
        return torch.from_numpy(answer.classes), torch.from_numpy(answer.log_probs)


def weights_of(layer: nn.Module) -> list[Tensor]:
    """Parameters and buffers: as `parameters()` and `buffers()`, in a fraction of the time."""
    return [
        weight
        for module in layer.modules()
        for named in (module._parameters, module._buffers)
        for weight in named.values()
        if weight is not None
    ]
