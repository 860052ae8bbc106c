"""The language-model task: the next word is the class, a word model's state the hidden vector."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.data import run_folder
from trainer.data.files import write_json
from trainer.tasks.language_model import corpus as corpora
from trainer.tasks.language_model import encoder as encoders
from trainer.tasks.language_model import hidden_states
from trainer.tasks.language_model.corpus import SPLITS, Corpus
from trainer.tasks.language_model.encoder import Encoder
from trainer.tasks.language_model.encoder_training import EncoderConfig, train_encoder
from trainer.training.loop import stop_requests

ENCODER = "encoder.npz"  # trained here; there once training is complete
ENCODER_TRAINING = "encoder"  # folder of its checkpoint and metrics.jsonl


def run(
    data: Path,
    config: EncoderConfig,
    folder: Path,
    *,
    encoder_file: Path | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Take or train an encoder, write its hidden vectors, and measure its full softmax.

    Returns what encoder.json holds.
    """
    given, vocabulary = encoders.load(encoder_file) if encoder_file else (None, None)
    corpus = corpora.read(data, vocabulary)
    settings = {
        "task": "language-model",
        "corpus": corpus.name,
        "data": corpus.digest(),
        "encoder": file_digest(encoder_file) if encoder_file else None,
        **asdict(config),
    }
    run_folder.open_run(folder, settings, resume=resume)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with stop_requests() as stopped:
        encoder = given or trained_encoder(config, corpus, folder, stopped, resume=resume)
        hidden_states.dump(encoder, corpus, folder / hidden_states.FOLDER, stopped)
    return encoder_figures(corpus, encoder, folder, trained=given is None)


def trained_encoder(
    config: EncoderConfig,
    corpus: Corpus,
    folder: Path,
    stopped: Callable[[], bool],
    *,
    resume: bool,
) -> Encoder:
    path = folder / ENCODER
    if not (resume and path.exists()):
        encoder = train_encoder(config, corpus, folder / ENCODER_TRAINING, stopped, resume=resume)
        encoders.save(path, encoder, corpus.vocabulary)
    return encoders.load(path)[0]


def encoder_figures(
    corpus: Corpus, encoder: Encoder, folder: Path, *, trained: bool
) -> dict[str, Any]:
    path, vectors = folder / hidden_states.FIGURES, folder / hidden_states.FOLDER
    if path.exists():
        return json.loads(path.read_text())
    head = np.load(vectors / hidden_states.HEAD)
    figures = {
        "corpus": corpus.name,
        "n_classes": len(corpus.vocabulary),
        "hidden_size": encoder.head.in_features,
        "layers": encoder.lstm.num_layers,
        "trained_here": trained,
        "tokens": {split: len(corpus.splits[split]) for split in SPLITS},
    }
    for split in ("valid", "test"):
        rows = np.load(hidden_states.rows_file(vectors, split), mmap_mode="r")
        figures[split] = hidden_states.full_softmax(rows, corpus.splits[split], head)
    write_json(path, figures)
    return figures


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
