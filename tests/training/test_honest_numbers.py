"""What `dss train` prints and stores comes from rows that nothing was learned from or chosen on."""

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.dss_process import dss, on_terminal

from trainer.data import held_out, run_folder
from trainer.data.arrays import Head, Vectors
from trainer.training import from_vectors
from trainer.training.config import VectorsConfig, make_config

N, D, CLUSTERS, ROWS = 60, 12, 6, 6000
QUICK = {"n_experts": 6, "batch_size": 100, "threads": 1, "epochs": 2, "rows": 18.0}
REPORTED = held_out.put_aside(ROWS)[1].report


def made_up(rows: int = ROWS) -> tuple[Vectors, Head]:
    """Six directions with ten classes around each; the head is the true one."""
    rng = np.random.default_rng(0)
    head = np.repeat(4 * np.eye(CLUSTERS, D), N // CLUSTERS, axis=0) + rng.normal(size=(N, D))
    labels = rng.integers(N, size=rows)
    hidden = head[labels] + 0.5 * rng.normal(size=(rows, D))
    return Vectors(hidden.astype(np.float32), labels), Head(head.astype(np.float32), None)


def run(vectors: Vectors, head: Head | None, folder: Path, **changes: object) -> dict[str, Any]:
    config = make_config(VectorsConfig, QUICK, changes)
    return from_vectors.run(config, {}, vectors, None, head, folder)


@pytest.mark.parametrize("given", [True, False], ids=["head", "no-head"])
def test_reported_rows_change_nothing_but_the_figures(tmp_path: Path, given: bool) -> None:
    """Their labels are all wrong the second time, and those of the rows beside them."""
    vectors, head = made_up()
    learned, aside = held_out.put_aside(ROWS)
    unused = np.setdiff1d(np.arange(ROWS), np.concatenate([learned, aside.choice]))
    assert np.isin(aside.report, unused).all() and len(unused) > len(aside.report)
    wrong = vectors.labels.copy()
    wrong[unused] = (wrong[unused] + N // 2) % N
    used = head if given else None
    before = run(vectors, used, tmp_path / "right", head_epochs=60)
    after = run(Vectors(vectors.hidden, wrong), used, tmp_path / "wrong", head_epochs=60)
    layers = [run_folder.load_layer(tmp_path / name) for name in ("right", "wrong")]
    assert np.array_equal(layers[0].keys, layers[1].keys)
    assert np.array_equal(layers[0].weight, layers[1].weight)
    assert before["accuracy"] > 0.5 and after["accuracy"] < 0.1
    assert after["full_accuracy"] < 0.1 and after["precision"] == before["precision"]


def test_the_figures_are_those_of_the_reported_rows(tmp_path: Path) -> None:
    vectors, head = made_up()
    summary = run(vectors, head, tmp_path / "run")
    layer = run_folder.load_layer(tmp_path / "run")
    rows = REPORTED
    hidden, labels = vectors.hidden[rows], vectors.labels[rows]
    logits = hidden @ head.weight.T
    first = layer.predict(torch.from_numpy(hidden)).numpy()
    assert summary["report_rows"] == len(rows) and summary["on"] == "held-out vectors"
    assert summary["accuracy"] == pytest.approx((first == labels).mean())
    assert summary["full_accuracy"] == pytest.approx((logits.argmax(1) == labels).mean())
    assert summary["precision"]["1"] == pytest.approx((first == logits.argmax(1)).mean())
    log_z = np.log(np.exp(logits).sum(axis=1))
    loss = log_z - logits[np.arange(len(rows)), labels]
    assert summary["full_perplexity"] == pytest.approx(np.exp(loss.mean()), rel=1e-4)
    stored = np.load(tmp_path / "run" / run_folder.HIDDEN)
    assert np.array_equal(stored, hidden)  # what export measures on, too


def test_few_rows_are_refused_before_any_work(tmp_path: Path) -> None:
    vectors, head = made_up(300)
    with pytest.raises(held_out.TooFewRows, match="There are 300 rows"):
        run(vectors, head, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- the start is kept if it is better ---------------------------------------------------------


def with_noise(vectors: Vectors) -> Vectors:
    """Labels to learn from are at random; those of the rows put aside are right."""
    labels = vectors.labels.copy()
    learned, _ = held_out.put_aside(len(labels))
    labels[learned] = np.random.default_rng(1).integers(N, size=len(learned))
    return Vectors(vectors.hidden, labels)


def test_learning_that_makes_it_worse_is_not_kept(tmp_path: Path) -> None:
    vectors, head = made_up()
    summary = run(
        with_noise(vectors), head, tmp_path / "run", distil=0.0, learning_rate=0.05, epochs=5
    )
    assert summary["kept"] == "start"
    assert summary["accuracy_at"] == summary["start_accuracy_at"]
    assert summary["accuracy"] > 0.5
    assert summary["mean_rows"] <= 18.5
    scores = json.loads((tmp_path / "run" / "round-1" / "scores.json").read_text())
    assert list(scores) == ["0", "1", "2"]  # ended early: both were worse


def test_learning_that_helps_is_kept(tmp_path: Path) -> None:
    vectors, head = made_up()
    summary = run(vectors, head, tmp_path / "run", rows=9.0, keep_one=False, learning_rate=0.001)
    assert summary["kept"] == "learned"
    assert summary["accuracy"] > summary["start_accuracy_at"]["1"]


# --- what a user sees --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    vectors, head = made_up()
    np.save(folder / "h.npy", vectors.hidden)
    np.save(folder / "y.npy", vectors.labels)
    np.save(folder / "noise.npy", with_noise(vectors).labels)
    np.save(folder / "w.npy", head.weight)
    return folder


def command(files: Path, labels: str = "y", objective: str = "accuracy") -> list[object]:
    arrays = ("--hidden", files / "h.npy", "--labels", files / f"{labels}.npy")
    settings = ("--experts", 6, "--set", "batch_size=100", "--set", "threads=1")
    chosen = ("--head", files / "w.npy", "--objective", objective)
    return ["train", *arrays, *chosen, *settings, "--set", "epochs=2"]


def test_the_table_and_the_lines_meanwhile(files: Path, tmp_path: Path) -> None:
    begun = time.monotonic()
    done = dss(*command(files), "--rows", 18, "--out", tmp_path / "run")
    took = time.monotonic() - begun
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / run_folder.SUMMARY).read_text())
    lines = done.stdout.splitlines()
    assert lines[0] == f"{tmp_path / 'run'}: measured on {len(REPORTED)} held-out vectors"
    names = [re.split(r"  +", line.strip())[0] for line in lines[2:]]
    assert names == [
        *("precision", "label accuracy", "before learning", "full softmax"),
        *("perplexity", "budget", "largest expert", "time"),
        summary["verdict"],
    ]
    assert f"precision         {summary['precision']['1']:>8.4f}" in done.stdout
    assert "18.0 classes per answer, used" in done.stdout
    told = [line.split("] ")[1] for line in done.stderr.splitlines() if line.startswith("[")]
    assert told == [
        *("reading", "reading", "clustering", "choosing classes", "teacher", "measuring"),
        *("teacher", "learning", "choosing classes", "measuring"),
    ]
    assert "The experts hold the full softmax's first class for" in done.stderr
    learning, reach = done.stderr.index("learning"), done.stderr.index("The experts hold")
    assert reach < learning  # before the long part
    assert set(summary["phases"]) == {*told, "other"}
    assert summary["seconds"] <= took + 0.1
    assert sum(summary["phases"].values()) == pytest.approx(summary["seconds"], abs=0.5)


def test_the_same_on_a_terminal(files: Path, tmp_path: Path) -> None:
    done = on_terminal(*command(files), "--rows", 18, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stdout
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stdout)
    summary = json.loads((tmp_path / "run" / run_folder.SUMMARY).read_text())
    for word in ("precision", "label accuracy", "before learning", "perplexity", "largest expert"):
        assert word in shown
    assert summary["verdict"] in " ".join(shown.split())
    assert "] clustering" not in shown  # bars tell that


def test_json_is_the_summary_and_nothing_else(files: Path, tmp_path: Path) -> None:
    done = dss(*command(files), "--rows", 18, "--out", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / run_folder.SUMMARY).read_text())
    assert json.loads(done.stdout) == {"run": str(tmp_path / "run"), **summary}


def test_a_kept_start_is_said(files: Path, tmp_path: Path) -> None:
    worse = ("--rows", 18, "--set", "distil=0", "--set", "learning_rate=0.05")
    done = dss(*command(files, "noise"), *worse, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    sentence = "Learning did not improve the layer on held-out rows, so it is kept as it began."
    assert sentence in done.stdout.splitlines()


def test_a_precision_that_is_required(files: Path, tmp_path: Path) -> None:
    tight = ("--rows", 3, "--no-keep-one", "--require-precision")
    done = dss(*command(files), *tight, 0.97, "--out", tmp_path / "run")
    assert done.returncode == 3, done.stderr
    summary = json.loads((tmp_path / "run" / run_folder.SUMMARY).read_text())
    reached = summary["precision"]["1"]
    assert reached < 0.97
    assert f"The precision is {reached:.4f} and 0.97 was required" in done.stderr
    assert "loses" in done.stdout and "allow" in done.stdout
    assert run_folder.load_layer(tmp_path / "run").n_classes == N
    met = dss(*command(files), "--rows", 30, "--require-precision", 0.5, "--out", tmp_path / "met")
    assert met.returncode == 0, met.stderr


def test_the_speedup_that_would_do_is_about_right(files: Path, tmp_path: Path) -> None:
    """A layer at the speedup that the first one names can reach about as much as was said."""
    tight = ("--rows", 4, "--no-keep-one", "--json")
    first = json.loads(dss(*command(files), *tight, "--out", tmp_path / "a").stdout)
    assert first["reachable"]["1"] < 0.95
    named = first["speedup_for_99"]
    assert 1 < named < first["flops_speedup"]
    tight = ("--speedup", named, "--no-keep-one", "--json")
    second = json.loads(dss(*command(files), *tight, "--out", tmp_path / "b").stdout)
    assert second["reachable"]["1"] >= 0.97


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            ["--objective", "fidelity", "--method", "warm"],
            "--method goes with --objective accuracy",
        ),
        (["--require-precision", "1.5"], "1.5 is not in the range"),
    ],
)
def test_wrong_usage(files: Path, change: list[str], sentence: str) -> None:
    done = dss(*command(files), *change)
    assert done.returncode == 2
    assert sentence in " ".join(done.stderr.split())


def test_fidelity_needs_a_head(files: Path) -> None:
    arrays = ("--hidden", files / "h.npy", "--labels", files / "y.npy")
    done = dss("train", *arrays, "--objective", "fidelity")
    assert done.returncode == 2
    assert "--objective fidelity needs --head" in done.stderr
