"""Heads of word models: a given encoder, one of the data folder, one that is trained."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from helpers.training.tiny_corpus import write_corpus
from helpers.training.tiny_encoder import all_rows

from trainer.capture.folder import read_capture
from trainer.tasks.heads import words
from trainer.tasks.language_model import corpus as corpora
from trainer.tasks.language_model import encoder as encoders
from trainer.tasks.language_model.encoder import Encoder

Head = Callable[..., Result]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A corpus one level down, beside its encoder."""
    folder = tmp_path / "data"
    folder.mkdir()
    corpus = corpora.read(write_corpus(folder / "ptb"))
    torch.manual_seed(1)
    encoder = Encoder(len(corpus.vocabulary), 8, inputs=6, layers=2, dropout=0.5)
    encoders.save(folder / "ptb-encoder.npz", encoder, corpus.vocabulary)
    return folder


def test_each_split_has_its_own_files(data: Path, tmp_path: Path, head: Head) -> None:
    result = head("--from", "ptb", "--data", data, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    found = read_capture(tmp_path / "out")
    encoder, vocabulary = encoders.load(data / "ptb-encoder.npz")
    corpus = corpora.read(data, vocabulary)
    assert json.loads(result.output) == {
        "folder": str(tmp_path / "out"),
        "n_classes": 16,
        "hidden_size": 8,
        "rows": len(corpus.splits["train"]),
        "valid_rows": len(corpus.splits["valid"]),
        "test_rows": len(corpus.splits["test"]),
    }
    assert found.test_hidden is not None and found.test_labels is not None
    rows = all_rows(encoder, corpus, "test", 1)
    np.testing.assert_allclose(np.load(found.test_hidden), rows, atol=1e-6)
    assert np.load(found.test_labels).tolist() == corpus.splits["test"].tolist()
    assert np.array_equal(np.load(found.head), encoder.head.weight.detach().numpy())
    # Training rows come in the order in which streams are read; each has its own label.
    expected = all_rows(encoder, corpus, "train", 64)
    by_label = sorted(
        zip(np.load(found.labels).tolist(), np.load(found.hidden).tolist(), strict=True)
    )
    wanted = sorted(zip(corpus.splits["train"].tolist(), expected.tolist(), strict=True))
    assert [label for label, _ in by_label] == [label for label, _ in wanted]
    np.testing.assert_allclose([r for _, r in by_label], [r for _, r in wanted], atol=1e-6)
    assert (tmp_path / "out/labels.txt").read_text().splitlines() == list(vocabulary)
    assert not found.labels_are_heads


def test_fewer_rows_may_be_asked_for(data: Path, tmp_path: Path, head: Head) -> None:
    asked = ("--rows", 37, "--valid-rows", 5, "--dtype", "fp16")
    result = head("--from", "ptb", "--data", data, "--out", tmp_path / "out", *asked)
    assert result.exit_code == 0, result.output
    found = read_capture(tmp_path / "out")
    assert (found.rows, found.valid_rows, found.test_rows) == (37, 5, 5)
    assert np.load(found.hidden).dtype == np.float16
    assert "16 x 8, 37 rows to train on, 5 for validation, 5 for test" in result.output


def stop_once_at(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, calls = words.made, 0

    def stops(hidden: torch.Tensor, labels: np.ndarray) -> object:
        nonlocal calls
        calls += 1
        if calls == piece:
            raise KeyboardInterrupt
        return made(hidden, labels)

    monkeypatch.setattr(words, "made", stops)


def test_a_stopped_one_goes_on_with_the_same_files(
    data: Path, tmp_path: Path, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--from", "ptb", "--data", data, "--out")
    assert head(*arguments, tmp_path / "whole").exit_code == 0
    stop_once_at(30, monkeypatch)
    result = head(*arguments, tmp_path / "stopped")
    assert result.exit_code == 130
    assert "the same command goes on" in result.output
    assert json.loads((tmp_path / "stopped/progress.json").read_text())["batches"] == 29
    result = head(*arguments, tmp_path / "stopped")
    assert result.exit_code == 0, result.output
    for file in (tmp_path / "whole").glob("*.npy"):
        assert file.read_bytes() == (tmp_path / "stopped" / file.name).read_bytes()


def test_it_does_not_go_on_with_another_encoder(
    data: Path, tmp_path: Path, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_once_at(3, monkeypatch)
    arguments = ("--from", "ptb", "--data", data, "--out", tmp_path / "out")
    assert head(*arguments).exit_code == 130
    encoder, vocabulary = encoders.load(data / "ptb-encoder.npz")
    with torch.no_grad():
        encoder.emb.weight.add_(1)
    encoders.save(data / "ptb-encoder.npz", encoder, vocabulary)
    result = head(*arguments)
    assert result.exit_code == 1
    assert "holds another capture, with another encoder" in result.output


def test_without_an_encoder_one_is_trained(data: Path, tmp_path: Path, head: Head) -> None:
    (data / "ptb-encoder.npz").unlink()
    small = [f"--set={setting}" for setting in ("units=5", "streams=3", "steps=7")]
    out = tmp_path / "out"
    result = head("--from", "ptb", "--data", data, "--out", out, "--epochs", 1, *small)
    assert result.exit_code == 0, result.output
    assert read_capture(out).hidden_size == 5
    trained, _ = encoders.load(out / "encoder-run/encoder.npz")
    assert np.array_equal(np.load(out / "head.npy"), trained.head.weight.detach().numpy())
    # The run serves as an encoder itself.
    again = ("--from", "ptb", "--data", data, "--encoder", out / "encoder-run")
    result = head(*again, "--out", tmp_path / "again")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "again/hidden.npy").read_bytes() == (out / "hidden.npy").read_bytes()


def test_what_is_missing_is_told(data: Path, tmp_path: Path, head: Head) -> None:
    out = ("--out", tmp_path / "out")
    result = head("--from", "ptb", *out)
    assert result.exit_code == 2 and "--from ptb needs --data" in result.output
    result = head("--from", "wikitext", "--data", data, *out)
    assert result.exit_code == 1
    assert "holds no wiki.{train,valid,test}.tokens" in result.output
    result = head("--from", "ptb", "--data", data, "--size", "tiny", *out)
    assert result.exit_code == 2 and "--size does not go with --from ptb." in result.output
    result = head("--from", "ptb", "--data", data, "--encoder", tmp_path / "none.npz", *out)
    assert result.exit_code == 1 and "There is no file" in result.output
    assert not (tmp_path / "out").exists()
