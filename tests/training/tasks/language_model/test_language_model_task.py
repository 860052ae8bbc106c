"""The language-model task and its command; a stopped run goes on."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.dss_process import dss
from helpers.training.tiny_encoder import all_rows, config

from trainer.data import run_folder
from trainer.tasks.language_model import corpus as corpora
from trainer.tasks.language_model import encoder as encoders
from trainer.tasks.language_model import hidden_states, task
from trainer.training.config import ConfigInvalid
from trainer.training.loop import Interrupted

TASK = ("task", "language-model")
DATA = os.environ.get("DSS_DATA")


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
