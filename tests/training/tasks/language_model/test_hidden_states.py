"""Hidden vectors on disk, and what the full softmax makes of them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.training.tiny_encoder import all_rows, never

from trainer.tasks.language_model import corpus as corpora
from trainer.tasks.language_model import hidden_states
from trainer.tasks.language_model.encoder import Encoder
from trainer.training.loop import Interrupted


def test_dumped_vectors_are_those_of_reading_word_by_word(
    tmp_path: Path, encoder: Encoder, corpus: corpora.Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is carried over pieces and lines, and vectors times head are the logits."""
    monkeypatch.setattr(hidden_states, "STEPS", 10)
    hidden_states.dump(encoder, corpus, tmp_path, never)
    rows = np.load(tmp_path / "test.npy")
    labels = np.load(tmp_path / "test.labels.npy")
    head = np.load(tmp_path / "head.npy")
    assert (rows.dtype, labels.dtype, head.dtype) == (np.float32, np.int32, np.float32)
    assert np.array_equal(labels, corpus.splits["test"])
    assert (tmp_path / "labels.txt").read_text().split() == list(corpus.vocabulary)

    state, word = None, corpus.start
    with torch.no_grad():
        for row, label in zip(rows, labels, strict=True):
            step, state = encoder(torch.tensor([[word]]), state)
            logits = encoder.head(step[0, 0]).numpy()
            np.testing.assert_allclose(row, step[0, 0].numpy(), atol=1e-6)
            np.testing.assert_allclose(head @ row, logits, atol=1e-6)
            word = int(label)


def test_training_vectors_of_streams_keep_the_order_of_the_text(
    encoder: Encoder, corpus: corpora.Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "STEPS", 10)
    whole = all_rows(encoder, corpus, "train", 1)
    cut = all_rows(encoder, corpus, "train", 7)  # 576 rows: six streams of 83 and one of 78
    assert np.isfinite(cut).all()
    np.testing.assert_allclose(cut[:83], whole[:83], atol=1e-6)
    assert not np.allclose(cut[83], whole[83], atol=1e-6)  # an empty state
    tokens = corpus.splits["train"]
    second = corpora.Corpus("second", corpus.vocabulary, {"train": tokens[82:166]})
    alone = torch.from_numpy(second.splits["train"]).long()[:-1, None]
    np.testing.assert_allclose(cut[83:166], encoder(alone)[0][:, 0].detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("n_streams", [1, 2, 83, 84, 100])
def test_every_row_is_written_once(
    encoder: Encoder, corpus: corpora.Corpus, n_streams: int
) -> None:
    tokens = corpus.splits["test"]
    pieces = list(hidden_states.hidden_vectors(encoder, tokens, corpus.start, n_streams))
    written = np.concatenate([np.arange(first, first + len(rows)) for first, rows in pieces])
    assert sorted(written.tolist()) == list(range(len(tokens)))


def test_complete_files_are_left_alone_and_torn_ones_are_not_seen(
    tmp_path: Path, encoder: Encoder, corpus: corpora.Corpus
) -> None:
    hidden_states.dump(encoder, corpus, tmp_path, never)
    expected = (tmp_path / "test.npy").read_bytes()
    assert not list(tmp_path.glob(".*"))
    before = (tmp_path / "train.npy").stat().st_mtime_ns
    (tmp_path / "test.npy").unlink()
    with pytest.raises(Interrupted, match="resume"):
        hidden_states.dump(encoder, corpus, tmp_path, lambda: True)
    assert not (tmp_path / "test.npy").exists()
    hidden_states.dump(encoder, corpus, tmp_path, never)
    assert (tmp_path / "test.npy").read_bytes() == expected
    assert (tmp_path / "train.npy").stat().st_mtime_ns == before


def test_the_full_softmax_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits ln 1 ... ln 16 in every row: class c has probability (c + 1) / 136."""
    monkeypatch.setattr(hidden_states, "ROWS_AT_ONCE", 2)
    head = np.log(np.arange(1, 17, dtype=np.float32))[:, None]
    labels = np.array([15, 14, 10, 1, 0], np.int32)
    found = hidden_states.full_softmax(np.ones((5, 1), np.float32), labels, head)
    likelihood = np.prod((labels + 1.0) / 136)
    assert found["perplexity"] == pytest.approx(likelihood ** (-1 / 5), rel=1e-5)
    assert found["accuracy"] == {"1": 0.2, "5": 0.4, "10": 0.6}


def test_the_loss_without_files_is_that_of_the_dump(
    tmp_path: Path, encoder: Encoder, corpus: corpora.Corpus
) -> None:
    hidden_states.dump(encoder, corpus, tmp_path, never)
    rows, head = np.load(tmp_path / "valid.npy"), np.load(tmp_path / "head.npy")
    found = hidden_states.full_softmax(rows, corpus.splits["valid"], head)
    loss = hidden_states.mean_loss(encoder, corpus.splits["valid"], corpus.start, 1)
    assert np.exp(loss) == pytest.approx(found["perplexity"], rel=1e-5)
