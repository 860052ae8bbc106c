"""Reads a user's batches: inputs of the model, and a label for each hidden vector.

| a batch is | the model gets | labels |
|---|---|---|
| a mapping, as of transformers | all but `labels`, by name | `labels`, or the next of `input_ids` |
| `(inputs, targets)` | all but the last | the last |
| a tensor of token ids | the tensor | the next token |

S sequences, T tokens.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from service.errors import DSSError

Batch = Any
Labels = Callable[[Batch], Tensor]
Forward = Callable[[nn.Module, Batch], object]

LABELS = ("labels", "label")  # what a mapping calls them


class BatchUnclear(DSSError):
    pass


class LabelsUnclear(DSSError):
    pass


# --- the model's inputs -----------------------------------------------------------------------


def run_model(model: nn.Module, batch: Batch) -> object:
    """Call the model on a batch without its labels, moved to where the model is."""
    batch = _only(batch)
    if isinstance(batch, Mapping):
        return _call(model, {name: part for name, part in batch.items() if name not in LABELS})
    if isinstance(batch, tuple | list) and len(batch) > 1:
        inputs = batch[:-1]
        return _call(model, inputs[0] if len(inputs) == 1 else inputs)
    if isinstance(batch, Tensor):
        return _call(model, batch)
    raise BatchUnclear(
        f"A batch is a {type(batch).__name__}; give forward= and labels= to say what is in it."
    )


def _call(model: nn.Module, inputs: Batch) -> object:
    inputs = _moved(inputs, next(model.parameters()).device)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _moved(part: Batch, device: torch.device) -> Batch:
    if isinstance(part, Tensor):
        return part.to(device)
    if isinstance(part, Mapping):
        return {name: _moved(value, device) for name, value in part.items()}
    if isinstance(part, tuple | list):
        return [_moved(value, device) for value in part]
    return part


def _only(batch: Batch) -> Batch:
    """Unwraps a tensor in a tuple of one, as a TensorDataset gives it."""
    return batch[0] if isinstance(batch, tuple | list) and len(batch) == 1 else batch


# --- labels -----------------------------------------------------------------------------------


class DefaultLabels:
    """A label for each hidden vector of a batch, `ignore_index` where there is none.

    Labels that repeat the tokens of `input_ids` mean that the model predicts the next one, as in
    transformers: the vector at t then belongs to token t+1. Labels that differ from them (of a
    masked or a sequence-to-sequence model) stand where they belong already. The first batch
    decides, unless `shift` says so.
    """

    def __init__(self, shift: bool | None, ignore_index: int) -> None:
        self.shift = shift
        self._ignore_index = ignore_index

    def __call__(self, batch: Batch) -> Tensor:
        batch = _only(batch)
        if isinstance(batch, Mapping):
            return self._of_mapping(batch)
        if isinstance(batch, tuple | list) and len(batch) > 1 and isinstance(batch[-1], Tensor):
            return self._next(batch[-1]) if self.shift else batch[-1]
        if isinstance(batch, Tensor) and not batch.is_floating_point():
            return batch if self.shift is False else self._next(batch)
        raise LabelsUnclear(
            f"A batch is a {type(batch).__name__} in which no labels are seen; give labels=."
        )

    def _of_mapping(self, batch: Mapping[str, Any]) -> Tensor:
        tokens, mask = batch.get("input_ids"), batch.get("attention_mask")
        labels = next((batch[name] for name in LABELS if batch.get(name) is not None), tokens)
        if not isinstance(labels, Tensor):
            raise LabelsUnclear(
                f"A batch has {_listed(batch)}, and neither labels nor input_ids; give labels=."
            )
        if self.shift is None:
            self.shift = _repeats(labels, tokens, self._ignore_index)
        if isinstance(mask, Tensor) and mask.shape == labels.shape:
            seen = mask.bool()
            labels = labels.masked_fill(~seen, self._ignore_index)
            if self.shift:  # vectors of padding predict nothing
                return self._next(labels).masked_fill(~seen, self._ignore_index)
        return self._next(labels) if self.shift else labels

    def _next(self, tokens: Tensor) -> Tensor:
        """[..., T]: at t the token t+1, and nothing at the end."""
        last = tokens.new_full((*tokens.shape[:-1], 1), self._ignore_index)
        return torch.cat([tokens[..., 1:], last], dim=-1)


def _repeats(labels: Tensor, tokens: object, ignore_index: int) -> bool:
    if not isinstance(tokens, Tensor) or labels.shape != tokens.shape:
        return False
    return bool(((labels == tokens) | (labels == ignore_index)).all())


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names))
