"""`dss train --objective fidelity`: from somebody's arrays to a bundle of the head's answers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.dss_process import dss

from service import bundle
from service.engine import Engine
from service.terminal.phases import Phases
from service.topk import Mode
from trainer.data import run_folder
from trainer.data.arrays import open_head, open_vectors
from trainer.layer.head_softmax import HeadSoftmax
from trainer.training import from_vectors
from trainer.training.config import VectorsConfig, make_config
from trainer.training.fidelity import method

Capture = pytest.CaptureFixture[str]
N, D, GROUPS = 240, 16, 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight directions with thirty classes around each; labels are drawn from the head."""
    folder = tmp_path_factory.mktemp("vectors")
    rng = np.random.default_rng(0)
    centres = 2 * np.eye(GROUPS, D)
    head = (np.repeat(centres, N // GROUPS, axis=0) + 0.7 * rng.normal(size=(N, D))).astype(
        np.float32
    )
    for name, rows in (("train", 12_000), ("valid", 4_000)):
        near = rng.integers(N, size=rows)
        hidden = (0.8 * head[near] + 0.4 * rng.normal(size=(rows, D))).astype(np.float32)
        np.save(folder / f"{name}.npy", hidden)
        np.save(folder / f"{name}.labels.npy", (hidden @ head.T).argmax(axis=1).astype(np.int32))
    np.save(folder / "head.npy", head)
    return folder


def train(files: Path, out: Path, *more: object) -> dict[str, object]:
    done = dss(
        "train",
        *("--hidden", files / "train.npy", "--labels", files / "train.labels.npy"),
        *("--head", files / "head.npy"),
        *("--valid-hidden", files / "valid.npy", "--valid-labels", files / "valid.labels.npy"),
        *("--experts", 8, "--set", "threads=1", "--out", out, *more),
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, object] = json.loads((out / run_folder.SUMMARY).read_text())
    return summary


@pytest.fixture(scope="module")
def run(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    summary = train(files, out, "--speedup", 3)
    assert summary["objective"] == "fidelity"
    return out


def test_most_answers_are_the_heads_within_the_budget(run: Path) -> None:
    summary = json.loads((run / run_folder.SUMMARY).read_text())
    assert summary["precision"]["1"] > 0.95 and summary["precision"]["10"] > 0.88
    assert summary["flops_speedup"] > 0.95 * 3
    assert abs(summary["perplexity"] / summary["full_perplexity"] - 1) < 0.05
    assert 0 < summary["log_prob_error"] < 0.2
    layer = run_folder.load_layer(run)
    assert isinstance(layer, HeadSoftmax)
    assert (torch.bincount(layer.class_of_row, minlength=N) > 0).all()  # a copy of every class


def test_the_gate_finds_more_than_clusters_alone(run: Path) -> None:
    summary = json.loads((run / run_folder.SUMMARY).read_text())
    assert summary["kept"] == "learned"
    assert summary["precision"]["10"] > summary["reachable"]["10"] - 0.005


def test_a_bundle_answers_as_the_head_does(run: Path, files: Path, tmp_path: Path) -> None:
    done = dss("export", run, tmp_path / "1", "--calibrate", files / "valid.npy")
    assert done.returncode == 0, done.stderr
    made = bundle.read(tmp_path / "1", head=True)
    engine, hidden = Engine(made), np.load(files / "valid.npy")
    scores = hidden.astype(np.float64) @ np.load(files / "head.npy").astype(np.float64).T
    best = np.argsort(-scores, axis=1, kind="stable")[:, :10]
    assert np.array_equal(engine.topk(hidden, 10, mode=Mode(exact=True)).classes, best)
    assert made.manifest.contract is not None
    for recall in (0.9, 0.99):
        answer = engine.topk(hidden, 10, mode=Mode(recall=recall))
        kept = (answer.classes[:, :, None] == best[:, None]).any(axis=2).mean()
        assert kept >= recall
        assert answer.rungs is not None and (answer.rungs == 0).mean() > 0.0


def test_a_run_that_was_stopped_begins_anew(
    run: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The same layer as without the break, no file more, and a clock that counts both tries."""

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    whole = json.loads((run / run_folder.CONFIG).read_text())
    names = ("hidden", "labels", "head")
    paths = {name: whole.pop(name) for name in names}
    training = open_vectors(
        files / "train.npy", files / "train.labels.npy", n_classes=N, hidden_size=D
    )
    valid = open_vectors(
        files / "valid.npy", files / "valid.labels.npy", n_classes=N, hidden_size=D
    )
    config = make_config(VectorsConfig, {k: v for k, v in whole.items() if k != "task"})
    inputs = (config, paths, training, valid, open_head(Path(paths["head"]), None), tmp_path)
    began = Phases()
    with monkeypatch.context() as patch:
        patch.setattr(method, "fit_rest", stopped)
        with pytest.raises(KeyboardInterrupt):
            from_vectors.run(*inputs, clock=began)
    assert "the same command with --resume begins it anew." in capsys.readouterr().err
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "phases.json"}
    earlier = from_vectors.earlier_seconds(tmp_path)
    assert sum(earlier.values()) == pytest.approx(began.total, abs=0.5)
    again = Phases()
    summary = from_vectors.run(*inputs, resume=True, clock=again)
    assert summary["seconds"] == pytest.approx(sum(summary["phases"].values()), abs=0.5)
    assert summary["seconds"] > sum(earlier.values())
    assert summary["phases"]["learning"] > earlier["learning"] > 0
    names_of = [{file.name for file in folder.iterdir()} for folder in (tmp_path, run)]
    assert names_of[0] == names_of[1]
    layers = [run_folder.load_layer(folder) for folder in (tmp_path, run)]
    assert torch.equal(layers[0].keys, layers[1].keys)
    assert torch.equal(layers[0].gate, layers[1].gate)


def test_without_a_copy_of_every_class_there_is_room_for_more(files: Path, tmp_path: Path) -> None:
    summary = train(files, tmp_path / "run", "--speedup", 5, "--no-keep-one")
    assert summary["precision"]["1"] > 0.88


def test_a_changed_head_is_refused(run: Path, files: Path, tmp_path: Path) -> None:
    other = np.load(files / "head.npy")
    other[0, 0] += 1
    np.save(tmp_path / "other.npy", other)
    done = dss("export", run, tmp_path / "1", "--head", tmp_path / "other.npy")
    assert done.returncode == 1 and "is not the one that the run" in done.stderr
    assert not (tmp_path / "1").exists()
