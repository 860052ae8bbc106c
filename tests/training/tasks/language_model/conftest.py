"""A small corpus and an encoder that fits it; PyTorch uses one thread."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.training.tiny_corpus import write_corpus

from trainer.tasks.language_model import corpus as corpora
from trainer.tasks.language_model.encoder import Encoder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def corpus(data: Path) -> corpora.Corpus:
    return corpora.read(data)


@pytest.fixture
def encoder(corpus: corpora.Corpus) -> Encoder:
    torch.manual_seed(1)
    return Encoder(len(corpus.vocabulary), 8, inputs=6, layers=2, dropout=0.5).eval()
