"""The word models of `dss task language-model`, on the corpus' own training, valid and test files.

M rows, D hidden, N classes.
"""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.capture.folder import NAMES, Captured
from trainer.capture.pieces import Made, Piece, Source, write_pieces
from trainer.data import run_folder
from trainer.data.files import write_whole
from trainer.tasks.heads.wanted import Wanted
from trainer.tasks.language_model import corpus as corpora
from trainer.tasks.language_model import encoder as encoders
from trainer.tasks.language_model.corpus import SPLITS, Corpus
from trainer.tasks.language_model.encoder import Encoder
from trainer.tasks.language_model.encoder_training import EncoderConfig
from trainer.tasks.language_model.hidden_states import STREAMS, hidden_vectors
from trainer.tasks.language_model.task import ENCODER, file_digest, trained_encoder
from trainer.training.loop import stop_requests

GIVEN = "{}-encoder.npz"  # of a corpus, beside it or in it
TRAINING = "encoder-run"  # in the capture folder: the run of an encoder that was trained for it

# What `docs/reproduce.md` trains with, where it is not the default.
TRAINED_WITH: dict[str, dict[str, Any]] = {
    "ptb": {},
    "wikitext": {"epochs": 9, "streams": 40, "samples": 2048},
}


def write(
    kind: str,
    data: Path,
    out: Path,
    *,
    wanted: Wanted,
    dtype: str,
    config: EncoderConfig,
    encoder: Path | None = None,
) -> Captured:
    """`encoder` is a file or a run; without it the one in the data folder, or else a trained one.

    M rows of a split are the states before each of its words, and the words are their labels.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    file = encoder_file(encoder, data, kind)
    if file is None:
        file = train_once(kind, data, out / TRAINING, config)
    model, vocabulary = encoders.load(file)
    corpus = corpora.read(data, vocabulary, kind)
    captured = write_pieces(source(model, corpus, wanted, file_digest(file)), out, dtype)
    write_whole(out / NAMES, "".join(f"{word}\n" for word in vocabulary).encode())
    return captured


def encoder_file(given: Path | None, data: Path, kind: str) -> Path | None:
    """The one that is to be used; None if there is none yet."""
    if given is not None:
        return given / ENCODER if given.is_dir() else given
    _, files = corpora.find(data, kind)
    places = (data, files["train"].parent)
    return next((f for p in places if (f := p / GIVEN.format(kind)).is_file()), None)


def train_once(kind: str, data: Path, folder: Path, config: EncoderConfig) -> Path:
    """Train an encoder in this run folder, or go on with it; its file if it is complete."""
    corpus = corpora.read(data, name=kind)
    settings = {"task": "head", "corpus": kind, "data": corpus.digest(), **asdict(config)}
    resume = (folder / run_folder.CONFIG).exists()
    run_folder.open_run(folder, settings, resume=resume)
    with stop_requests() as stopped:
        trained_encoder(config, corpus, folder, stopped, resume=resume)
    return folder / ENCODER


def source(encoder: Encoder, corpus: Corpus, wanted: Wanted, digest: str) -> Source:
    head: NDArray[np.float32] = encoder.head.weight.detach().numpy()
    return Source(
        head,
        pieces(encoder, corpus, wanted),
        rows=sum(count(corpus, split, wanted) for split in SPLITS),
        about={
            "from": corpus.name,
            "encoder": digest,
            "data": corpus.digest(),
            "wanted": wanted.facts(),
        },
        facts={"labels": "the next word"},
    )


def count(corpus: Corpus, split: str, wanted: Wanted) -> int:
    most, there = wanted.of(split), len(corpus.splits[split])
    return there if most is None else min(most, there)


def pieces(encoder: Encoder, corpus: Corpus, wanted: Wanted) -> Iterator[Piece]:
    for split in SPLITS:
        tokens, room = corpus.splits[split], count(corpus, split, wanted)
        for first, hidden in hidden_vectors(encoder, tokens, corpus.start, STREAMS[split]):
            kept = hidden[:room]
            room -= len(kept)
            labels = tokens[first : first + len(kept)]
            yield Piece(split, len(kept), partial(made, kept, labels))
            if not room:
                break


def made(hidden: Tensor, labels: NDArray[np.int32]) -> Made:
    return hidden.numpy(), labels
