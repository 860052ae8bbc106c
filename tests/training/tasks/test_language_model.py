"""Corpus, encoder and hidden vectors of the language-model task."""

import json
import os
import shutil
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.dss_process import dss
from helpers.tiny_corpus import WORDS, write_corpus

from trainer.data import run_folder
from trainer.layer.losses import sampled_loss
from trainer.tasks.language_model import corpus as corpora
from trainer.tasks.language_model import encoder as encoders
from trainer.tasks.language_model import hidden_states, task
from trainer.tasks.language_model.encoder import Encoder
from trainer.tasks.language_model.encoder_training import (
    EncoderConfig,
    samples_softmax,
    training_streams,
)
from trainer.training.config import ConfigInvalid, make_config
from trainer.training.loop import Interrupted

TASK = ("task", "language-model")
DATA = os.environ.get("DSS_DATA")


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


# --- corpus -----------------------------------------------------------------------------------


def test_words_are_numbered_as_they_appear_with_eos_after_each_line(tmp_path: Path) -> None:
    (tmp_path / "wiki.train.tokens").write_text(" b a \n\n a <unk> b \n")
    (tmp_path / "wiki.valid.tokens").write_text("a\n")
    (tmp_path / "wiki.test.tokens").write_text("<unk> a")
    found = corpora.read(tmp_path)
    assert found.name == "wikitext"
    assert found.vocabulary == ("b", "a", "<eos>", "<unk>")
    assert found.splits["train"].tolist() == [0, 1, 2, 2, 1, 3, 0, 2]
    assert found.splits["valid"].tolist() == [1, 2]
    assert found.splits["test"].tolist() == [3, 1, 2]
    assert {tokens.dtype for tokens in found.splits.values()} == {np.dtype(np.int32)}


def test_counts_of_a_corpus_one_level_down(data: Path, corpus: corpora.Corpus) -> None:
    found = corpora.read(data.parent)
    assert {split: len(tokens) for split, tokens in found.splits.items()} == {
        "train": 16 + 80 * 7,
        "valid": 12 * 7,
        "test": 12 * 7,
    }
    assert found.vocabulary == corpus.vocabulary == (*WORDS, "<eos>")
    assert found.digest() == corpus.digest()


def test_a_given_vocabulary_sets_the_numbers(data: Path, corpus: corpora.Corpus) -> None:
    given = tuple(reversed(corpus.vocabulary))
    found = corpora.read(data, given)
    assert found.vocabulary == given
    assert [given[i] for i in found.splits["test"]] == [
        corpus.vocabulary[i] for i in corpus.splits["test"]
    ]
    assert found.digest() != corpus.digest()
    with pytest.raises(corpora.WordUnknown, match="'w3'"):
        corpora.read(data, [word for word in given if word != "w3"])


def test_what_is_no_corpus_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(corpora.CorpusMissing, match="not a folder"):
        corpora.read(tmp_path / "none")
    shutil.copytree(data, tmp_path / "second")
    with pytest.raises(corpora.CorpusAmbiguous, match="second"):
        corpora.read(tmp_path)
    (data / "ptb.valid.txt").write_bytes(b"")
    with pytest.raises(corpora.CorpusMalformed, match=r"ptb\.valid\.txt is empty"):
        corpora.read(data)
    (data / "ptb.valid.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(corpora.CorpusMalformed, match="UTF-8"):
        corpora.read(data)
    (data / "ptb.valid.txt").unlink()
    with pytest.raises(corpora.CorpusMissing, match=r"ptb\.\{train,valid,test\}\.txt"):
        corpora.read(data)


# --- encoder ----------------------------------------------------------------------------------


def test_an_encoder_survives_its_file(
    tmp_path: Path, encoder: Encoder, corpus: corpora.Corpus
) -> None:
    path = tmp_path / "encoder.npz"
    encoders.save(path, encoder, corpus.vocabulary)
    found, vocabulary = encoders.load(path)
    assert vocabulary == corpus.vocabulary
    assert found.state_dict().keys() == encoder.state_dict().keys()
    for name, weight in encoder.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight)
    words = torch.from_numpy(corpus.splits["test"]).long()[:, None]
    assert torch.equal(found(words)[0], encoder(words)[0])


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("vocab", None, "list of words"),
        ("vocab", lambda array: array[:-1], "emb.weight"),
        ("vocab", lambda array: np.full_like(array, "w"), "twice"),
        ("head.weight", None, "lacks"),
        ("head.weight", lambda array: array[:-1], "head.weight"),
        ("head.weight", lambda array: array[:, :0], "without columns"),
        ("lstm.bias_hh_l1", None, "lstm.bias_hh_l1"),
        ("lstm.bias_hh_l1", lambda array: array * np.nan, "not finite"),
        ("lstm.extra", lambda _: np.zeros(3), "lstm.extra"),
        ("emb.weight", lambda array: array.astype(object), "plain arrays"),
    ],
)
def test_a_wrong_encoder_is_refused(
    tmp_path: Path,
    encoder: Encoder,
    corpus: corpora.Corpus,
    name: str,
    change: Callable[[np.ndarray | None], np.ndarray] | None,
    sentence: str,
) -> None:
    path = tmp_path / "encoder.npz"
    encoders.save(path, encoder, corpus.vocabulary)
    with np.load(path) as file:
        arrays = dict(file)
    if change is None:
        del arrays[name]
    else:
        arrays[name] = change(arrays.get(name))
    np.savez(path, **arrays)
    with pytest.raises(encoders.EncoderMalformed, match=sentence):
        encoders.load(path)


def test_what_is_no_npz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "encoder.npz"
    with pytest.raises(encoders.EncoderMalformed, match="no file"):
        encoders.load(path)
    np.save(tmp_path / "array.npy", np.zeros(3))
    for content in (b"", b"text", b"PK\x03\x04torn", (tmp_path / "array.npy").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(encoders.EncoderMalformed, match=r"no \.npz file"):
            encoders.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vocab", "words")
    with pytest.raises(encoders.EncoderMalformed, match="no array"):
        encoders.load(path)


def test_a_damaged_npz_is_refused(tmp_path: Path, encoder: Encoder, corpus: corpora.Corpus) -> None:
    path = tmp_path / "encoder.npz"
    encoders.save(path, encoder, corpus.vocabulary)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(encoders.EncoderMalformed, match="plain arrays"):
        encoders.load(path)


# --- hidden vectors ---------------------------------------------------------------------------


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
    monkeypatch.setattr(hidden_states, "CHUNK", 2)
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


# --- training ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize("step", [1, 40, 112])  # of 4 epochs of 28
def test_an_interrupted_run_resumed_equals_an_unbroken_one(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    settings = config(sample_above=10, samples=8)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = task.run(data, settings, whole)

    steps = 0
    original = torch.optim.Adam.step

    def interrupting(self: torch.optim.Adam, *args: object, **kwargs: object) -> object:
        nonlocal steps
        steps += 1
        if steps == step:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", interrupting)
    with pytest.raises(Interrupted, match="resume"):
        task.run(data, settings, broken)
    assert not (broken / task.ENCODER).exists()
    torch.manual_seed(99)  # resuming depends on the checkpoint alone
    assert task.run(data, settings, broken, resume=True) == expected

    for name in ("encoder/metrics.jsonl", "hidden/train.npy", "hidden/test.npy", "hidden/head.npy"):
        assert (whole / name).read_bytes() == (broken / name).read_bytes(), name


def test_an_interruption_while_writing_vectors_is_resumed(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = task.run(data, config(), whole)
    trained = (whole / task.ENCODER).read_bytes()
    original = hidden_states.hidden_vectors

    def interrupting(*arguments: object) -> Iterator[tuple[int, torch.Tensor]]:
        if (broken / task.ENCODER).exists():
            os.kill(os.getpid(), signal.SIGINT)
        yield from original(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(hidden_states, "hidden_vectors", interrupting)
        with pytest.raises(Interrupted, match=r"train\.npy"):
            task.run(data, config(), broken)
    assert not (broken / "hidden" / "train.npy").exists()
    assert task.run(data, config(), broken, resume=True) == expected
    assert (broken / task.ENCODER).read_bytes() == trained


def test_a_given_encoder_is_used_as_it_is(tmp_path: Path, data: Path) -> None:
    """The file of a trained run, given to another one, leads to the same vectors."""
    first, second = tmp_path / "first", tmp_path / "second"
    expected = task.run(data, config(epochs=1), first)
    given = first / task.ENCODER
    found = task.run(data, config(), second, encoder_file=given)
    assert {**expected, "trained_here": False} == found
    assert not (second / "encoder").exists()
    assert (first / "hidden/test.npy").read_bytes() == (second / "hidden/test.npy").read_bytes()
    with pytest.raises(run_folder.RunDiffers, match="encoder"):
        task.run(data, config(), second, resume=True)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigInvalid, match="n_experts"):
        config(n_experts=3)
    with pytest.raises(ConfigInvalid, match="epochs"):
        config(epochs=0)


# --- the command ------------------------------------------------------------------------------


def test_the_command_finds_its_data_by_flag_or_variable(tmp_path: Path, data: Path) -> None:
    small = ("--epochs", 1, "--set", "units=4", "--set", "threads=1", "--until", "hidden")
    by_flag = dss(*TASK, "--data", data, "--out", tmp_path / "a", *small)
    assert by_flag.returncode == 0, by_flag.stderr
    assert "16 classes; full softmax on the test words: perplexity" in by_flag.stdout
    by_variable = dss(*TASK, "--out", tmp_path / "b", *small, "--json", DSS_DATA=str(data))
    assert by_variable.returncode == 0, by_variable.stderr
    assert json.loads(by_variable.stdout)["n_classes"] == 16
    assert "16 classes" in by_variable.stderr
    names = ("encoder.json", "config.json", "hidden/train.npy")
    assert all(
        (tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names
    )


def test_missing_data_is_said_in_one_sentence_and_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = dss(*TASK, "--data", tmp_path, "--out", out)
    assert result.returncode == 1
    assert result.stderr == (
        f"Error: {tmp_path} holds neither ptb.{{train,valid,test}}.txt nor"
        " wiki.{train,valid,test}.tokens, nor does a folder in it.\n"
    )
    assert not out.exists()


# --- the real corpus --------------------------------------------------------------------------


@pytest.mark.skipif(
    not DATA or not (Path(DATA) / "ptb-encoder.npz").exists(),
    reason="DSS_DATA names no folder with the Penn Treebank and ptb-encoder.npz",
)
def test_the_given_encoder_on_the_penn_treebank() -> None:
    found, vocabulary = encoders.load(Path(DATA) / "ptb-encoder.npz")  # type: ignore[arg-type]
    ptb = corpora.read(Path(DATA), vocabulary)  # type: ignore[arg-type]
    counts = {split: len(tokens) for split, tokens in ptb.splits.items()}
    assert counts == {"train": 929_589, "valid": 73_760, "test": 82_430}
    assert corpora.read(Path(DATA)).vocabulary == vocabulary  # type: ignore[arg-type]
    assert len(vocabulary) == 10_000
    figures = hidden_states.full_softmax(
        all_rows(found, ptb, "test", 1), ptb.splits["test"], found.head.weight.detach().numpy()
    )
    # Published with the encoder; cutting the text into 1, 10 or 20 streams moves them this much.
    assert figures["perplexity"] == pytest.approx(120.6, abs=0.15)
    shares = [figures["accuracy"][rank] for rank in ("1", "5", "10")]
    assert shares == pytest.approx([0.2345, 0.4232, 0.5047], abs=0.0004)
