"""The word model: an embedding, an LSTM and a full softmax, and its file.

T steps, S parallel streams of text, D hidden, N classes.
"""

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from service.errors import DSSError

State = tuple[Tensor, Tensor]  # h and c, both [layers,S,D]
VOCABULARY = "vocab"  # beside PyTorch's names of the weights


class EncoderMalformed(DSSError):
    pass


class Encoder(nn.Module):
    def __init__(
        self, n_classes: int, units: int, *, inputs: int | None = None, layers: int, dropout: float
    ) -> None:
        super().__init__()
        inputs = inputs or units
        self.emb = nn.Embedding(n_classes, inputs)
        self.lstm = nn.LSTM(inputs, units, layers, dropout=dropout if layers > 1 else 0.0)
        self.head = nn.Linear(units, n_classes, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.n_classes = n_classes
        nn.init.uniform_(self.emb.weight, -0.1, 0.1)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)

    def forward(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Hidden vectors [T,S,D] after each word of [T,S]; the head makes logits of them."""
        hidden, state = self.lstm(self.dropout(self.emb(words)), state)
        return self.dropout(hidden), state


def save(path: Path, encoder: Encoder, vocabulary: Sequence[str]) -> None:
    weights = {name: weight.numpy() for name, weight in encoder.state_dict().items()}
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        np.savez(file, **{VOCABULARY: np.array(vocabulary)}, **weights)
    temporary.replace(path)


def load(path: Path) -> tuple[Encoder, tuple[str, ...]]:
    """The encoder in eval mode, and its vocabulary."""
    arrays = read_arrays(path)
    vocabulary = arrays.pop(VOCABULARY, None)
    if vocabulary is None or vocabulary.ndim != 1 or vocabulary.dtype.kind != "U":
        raise EncoderMalformed(f"{path} has no list of words named {VOCABULARY!r}.")
    if len(set(vocabulary.tolist())) != len(vocabulary):
        raise EncoderMalformed(f"The vocabulary in {path} has a word twice.")
    encoder = empty_like(arrays, len(vocabulary), path)
    expected = {name: tuple(weight.shape) for name, weight in encoder.state_dict().items()}
    for name in sorted({*expected, *arrays}):
        shape = arrays[name].shape if name in arrays else None
        if shape != expected.get(name):
            raise EncoderMalformed(
                f"{path}: {name!r} has the shape {shape}, not {expected.get(name)}."
            )
        if arrays[name].dtype.kind != "f" or not np.isfinite(arrays[name]).all():
            raise EncoderMalformed(f"{path}: {name!r} has values that are not finite numbers.")
    encoder.load_state_dict({n: torch.from_numpy(a.astype(np.float32)) for n, a in arrays.items()})
    return encoder.eval(), tuple(vocabulary.tolist())


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise EncoderMalformed(f"There is no file {path}.")
    if not zipfile.is_zipfile(path):  # np.load would open other kinds of files as well
        raise EncoderMalformed(f"{path} is no .npz file.")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise EncoderMalformed(f"{path} is no .npz file of plain arrays.") from error
    if not all(isinstance(array, np.ndarray) for array in arrays.values()):
        raise EncoderMalformed(f"{path} holds something that is no array.")
    return arrays


def empty_like(arrays: dict[str, np.ndarray], n_classes: int, path: Path) -> Encoder:
    """An encoder of the size that the arrays suggest; whether all of them fit is seen later."""
    shapes = [arrays[name].shape for name in ("emb.weight", "head.weight") if name in arrays]
    layers = sum(bool(re.fullmatch(r"lstm\.weight_ih_l\d+", name)) for name in arrays)
    if [len(shape) for shape in shapes] != [2, 2] or not layers:
        raise EncoderMalformed(f"{path} lacks matrices emb.weight, lstm.* and head.weight.")
    (_, inputs), (_, units) = shapes
    if not inputs or not units:
        raise EncoderMalformed(f"{path} has matrices without columns.")
    return Encoder(n_classes, units, inputs=inputs, layers=layers, dropout=0.0)
