"""Hidden vectors of a corpus on disk, and what the full softmax makes of them.

Row i of a split's `.npy` is the state of the encoder that has read every word before word i, and
label i is word i itself.

M query rows, T steps, S parallel streams of text, D hidden, N classes.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from service.bundle.manifest import RECALL_AT
from service.terminal import progress
from trainer.data import run_folder
from trainer.data.arrays import chunks
from trainer.data.files import write_whole
from trainer.tasks.language_model.corpus import SPLITS, Corpus
from trainer.tasks.language_model.encoder import Encoder
from trainer.training.loop import Interrupted

FOLDER = "hidden"  # of a run: the vectors, labels, head and vocabulary
FIGURES = "encoder.json"  # of a run: what the full softmax makes of them
HEAD = "head.npy"
STEPS = 256  # words of a stream read at once
# A stream's first words lack their context, so text that is measured on is one stream.
STREAMS = {"train": 64, "valid": 1, "test": 1}
ROWS_AT_ONCE = 1024


def rows_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.npy"


def labels_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.labels.npy"


def dump(encoder: Encoder, corpus: Corpus, folder: Path, stopped: Callable[[], bool]) -> None:
    """Write what is not there yet. A file under its own name is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    names = "".join(f"{word}\n" for word in corpus.vocabulary)
    write_whole(folder / run_folder.LABELS, names.encode())
    save_array(folder / HEAD, encoder.head.weight.detach().numpy())
    for split in SPLITS:
        save_array(labels_file(folder, split), corpus.splits[split])
        if not rows_file(folder, split).exists():
            dump_split(encoder, corpus, split, folder, stopped)


def dump_split(
    encoder: Encoder, corpus: Corpus, split: str, folder: Path, stopped: Callable[[], bool]
) -> None:
    tokens, path = corpus.splits[split], rows_file(folder, split)
    temporary = path.with_name(f".{path.name}.tmp")
    shape = (len(tokens), encoder.head.in_features)
    rows = open_memmap(temporary, mode="w+", dtype=np.float32, shape=shape)
    with progress.bar(f"vectors of {split}", len(tokens)) as bar:
        for first, piece in hidden_vectors(encoder, tokens, corpus.start, STREAMS[split]):
            rows[first : first + len(piece)] = piece.numpy()
            bar.advance(len(piece))
            if stopped():
                raise Interrupted(f"Stopped before {path} was complete: resume the run.")
    rows.flush()
    temporary.replace(path)


def save_array(path: Path, array: NDArray[Any]) -> None:
    if not path.exists():
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("wb") as file:
            np.save(file, array)
        temporary.replace(path)


@torch.no_grad()
def hidden_vectors(
    encoder: Encoder, tokens: NDArray[np.int32], start: int, n_streams: int = 1
) -> Iterator[tuple[int, Tensor]]:
    """All rows in pieces, each with the number of its first row.

    The text is cut into streams of equal length that are read side by side, each from an empty
    state on; a stream carries its state from its first word to its last.
    """
    length = math.ceil(len(tokens) / n_streams)
    inputs = np.full(n_streams * length, start)
    inputs[1 : len(tokens)] = tokens[:-1]
    streams = torch.from_numpy(inputs).view(n_streams, length)  # [S,L]
    state = None
    for begin in range(0, length, STEPS):
        hidden, state = encoder(streams[:, begin : begin + STEPS].T, state)  # [T,S,D]
        for stream in range(n_streams):
            first = stream * length + begin
            if first < len(tokens):
                yield first, hidden[: len(tokens) - first, stream]


@torch.no_grad()
def mean_loss(encoder: Encoder, tokens: NDArray[np.int32], start: int, n_streams: int) -> float:
    """Nats a word of the full softmax, without anything on disk."""
    total, labels = 0.0, torch.from_numpy(tokens).long()
    for first, rows in hidden_vectors(encoder, tokens, start, n_streams):
        part = labels[first : first + len(rows)]
        total += cross_entropy(encoder.head(rows), part, reduction="sum").item()
    return total / len(tokens)


@torch.no_grad()
def full_softmax(
    rows: NDArray[np.float32], labels: NDArray[np.int32], head: NDArray[np.float32]
) -> dict[str, Any]:
    """Perplexity, and the share of rows [M,D] whose label is among the first 1, 5 and 10."""
    weight = torch.from_numpy(np.array(head))  # [N,D]
    loss, hits = 0.0, dict.fromkeys(RECALL_AT, 0)
    for part in chunks(len(rows), ROWS_AT_ONCE):
        logits = torch.from_numpy(np.array(rows[part])) @ weight.T  # [B,N]
        label = torch.from_numpy(labels[part].astype(np.int64))  # [B]
        loss += cross_entropy(logits, label, reduction="sum").item()
        best = logits.topk(min(max(RECALL_AT), len(weight))).indices  # [B,10]
        for rank in RECALL_AT:
            hits[rank] += int((best[:, :rank] == label[:, None]).sum())
    return {
        "perplexity": math.exp(loss / len(rows)),
        "accuracy": {str(rank): count / len(rows) for rank, count in hits.items()},
    }
