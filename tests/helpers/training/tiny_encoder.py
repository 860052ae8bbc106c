"""Settings under which an encoder is trained in a second, and what one makes of a text."""

import numpy as np

from trainer.tasks.language_model import corpus as corpora
from trainer.tasks.language_model import hidden_states
from trainer.tasks.language_model.encoder import Encoder
from trainer.tasks.language_model.encoder_training import EncoderConfig
from trainer.training.config import make_config


def config(**changes: object) -> EncoderConfig:
    small = {
        "units": 12,
        "epochs": 4,
        "streams": 3,
        "steps": 7,
        "learning_rate": 0.02,
        "checkpoint_seconds": 0,
        "threads": 1,
    }
    return make_config(EncoderConfig, small | changes)  # type: ignore[type-var]


def never() -> bool:
    return False


def all_rows(encoder: Encoder, corpus: corpora.Corpus, split: str, n_streams: int) -> np.ndarray:
    tokens = corpus.splits[split]
    rows = np.full((len(tokens), encoder.head.in_features), np.nan, np.float32)
    for first, piece in hidden_states.hidden_vectors(encoder, tokens, corpus.start, n_streams):
        rows[first : first + len(piece)] = piece.numpy()
    return rows
