"""Training of the word model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.training.tiny_encoder import config

from trainer.data import run_folder
from trainer.layer.losses import sampled_loss
from trainer.tasks.language_model import corpus as corpora
from trainer.tasks.language_model import encoder as encoders
from trainer.tasks.language_model import hidden_states, task
from trainer.tasks.language_model.encoder_training import (
    samples_softmax,
    training_streams,
)


def test_training_streams_hold_each_word_and_the_next(corpus: corpora.Corpus) -> None:
    words, labels = training_streams(corpus, 5)  # 576 words: a rest of one
    assert words.shape == labels.shape == (115, 5)
    assert torch.equal(words[1:], labels[:-1])
    assert torch.equal(words[0, 1:], labels[-1, :-1])
    assert labels.T.flatten().tolist() == corpus.splits["train"][:575].tolist()
    assert words[0, 0] == corpus.start


def test_the_sampled_denominator_is_unbiased() -> None:
    torch.manual_seed(0)
    rows, head = torch.randn(3, 4), torch.randn(20, 4)
    labels = torch.tensor([0, 7, 19])
    proposal = torch.arange(1.0, 21.0).double()
    own = (rows * head[labels]).sum(1)
    for row in range(3):
        one = slice(row, row + 1)
        draws = [sampled_loss(rows[one], labels[one], head, proposal, 50) for _ in range(4000)]
        estimate = (torch.stack(draws).double() + own[row]).exp().mean()
        exact = (rows[row] @ head.T).double().exp().sum()
        assert estimate.item() == pytest.approx(exact.item(), rel=0.02)


def test_only_large_vocabularies_are_sampled_and_the_last_epochs_never() -> None:
    settings = config(epochs=5, sample_above=10, full_epochs=2)
    assert [samples_softmax(settings, 11, epoch) for epoch in range(5)] == [True] * 3 + [False] * 2
    assert not samples_softmax(settings, 10, 0)


@pytest.mark.parametrize("sample_above", [20_000, 10], ids=["full", "sampled"])
def test_training_learns_and_keeps_the_best(tmp_path: Path, data: Path, sample_above: int) -> None:
    settings = config(epochs=8, sample_above=sample_above, samples=8, dropout=0.1)
    found = task.run(data, settings, tmp_path / "run")
    lines = [
        json.loads(line)
        for line in (tmp_path / "run" / "encoder" / run_folder.METRICS).read_text().splitlines()
    ]
    assert [line["sampled"] for line in lines] == [sample_above == 10] * 7 + [False]
    best = min(line["valid_perplexity"] for line in lines)
    one_stream = found["valid"]["perplexity"]
    assert one_stream == pytest.approx(best, rel=0.1)  # three streams during training
    assert found["test"]["perplexity"] < 5 < lines[0]["valid_perplexity"]
    assert found == json.loads((tmp_path / "run" / "encoder.json").read_text())
    assert found["tokens"] == {"train": 576, "valid": 84, "test": 84}
    assert task.run(data, settings, tmp_path / "run", resume=True) == found


def test_epochs_are_compared_on_the_first_validation_words(
    tmp_path: Path, data: Path, corpus: corpora.Corpus
) -> None:
    task.run(data, config(epochs=1, valid_words=20), tmp_path / "run")
    (line,) = (tmp_path / "run" / "encoder" / run_folder.METRICS).read_text().splitlines()
    trained, _ = encoders.load(tmp_path / "run" / "encoder.npz")
    loss = hidden_states.mean_loss(trained, corpus.splits["valid"][:20], corpus.start, 3)
    assert json.loads(line)["valid_perplexity"] == pytest.approx(np.exp(loss))


def test_the_learning_rate_falls_from_step_to_step(tmp_path: Path, data: Path) -> None:
    task.run(data, config(epochs=2, learning_rate_end=0.5), tmp_path / "run")
    lines = (tmp_path / "run" / "encoder" / run_folder.METRICS).read_text().splitlines()
    last = [0.02 * (1 - 0.5 * (28 * epoch - 1) / 56) for epoch in (1, 2)]  # 28 steps an epoch
    assert [json.loads(line)["learning_rate"] for line in lines] == pytest.approx(last)
