"""`dss train --hidden`: from somebody's arrays to a bundle that answers."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.dss_process import dss
from helpers.server import wait_until

from service.engine import Engine
from trainer.data import held_out, run_folder
from trainer.data.arrays import open_head, open_vectors
from trainer.data.rows import MappedRows
from trainer.export.export import export
from trainer.training import from_vectors
from trainer.training.config import make_config
from trainer.training.from_vectors import VectorsConfig, mean_rows_allowed

DSS = [sys.executable, "-m", "service.cli"]
N, D, CLUSTERS = 60, 12, 6
SETTINGS = ["--objective", "accuracy", "--experts", "6"]
SETTINGS += ["--set", "batch_size=100", "--set", "threads=1"]
REPORTED = held_out.in_halves(500).report  # of the validation rows


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six directions with ten classes around each; the head is the true one."""
    folder = tmp_path_factory.mktemp("vectors")
    rng = np.random.default_rng(0)
    centres = 4 * np.eye(CLUSTERS, D)
    head = (np.repeat(centres, N // CLUSTERS, axis=0) + rng.normal(size=(N, D))).astype(np.float32)
    for name, rows in (("train", 3000), ("valid", 500)):
        labels = rng.integers(N, size=rows)
        hidden = head[labels] + 0.3 * rng.normal(size=(rows, D))
        np.save(
            folder / f"{name}.npy", hidden.astype(np.float16 if name == "train" else np.float32)
        )
        np.save(folder / f"{name}.labels.npy", labels.astype(np.int32))
    np.save(folder / "head.npy", head)
    return folder


def arguments(files: Path) -> list[str]:
    return [
        "train",
        *("--hidden", str(files / "train.npy"), "--labels", str(files / "train.labels.npy")),
        *("--head", str(files / "head.npy")),
        *("--valid-hidden", str(files / "valid.npy")),
        *("--valid-labels", str(files / "valid.labels.npy")),
        *SETTINGS,
    ]


def test_from_arrays_to_a_served_layer(files: Path, tmp_path: Path) -> None:
    done = dss(*arguments(files), "--rows", 18, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "classes per answer" in done.stdout
    summary = json.loads((tmp_path / "run" / run_folder.SUMMARY).read_text())
    assert summary["mean_rows"] <= 18.5
    assert summary["mean_copies"] >= 1
    assert summary["accuracy"] >= summary["full_accuracy"] - 0.01
    written = export(tmp_path / "run", tmp_path / "models" / "own" / "1")
    hidden = np.load(files / "valid.npy")[REPORTED]
    labels = np.load(files / "valid.labels.npy")[REPORTED]
    answer = Engine(written).topk(hidden, 1)
    assert (answer.classes[:, 0] == labels).mean() == pytest.approx(summary["accuracy"], abs=1e-9)
    report = tmp_path / "report.json"
    np.save(tmp_path / "hidden.npy", hidden)
    np.save(tmp_path / "labels.npy", labels)
    evaluated = dss(
        *("evaluate", tmp_path / "models" / "own" / "1", "--out", report),
        *("--hidden", tmp_path / "hidden.npy", "--labels", tmp_path / "labels.npy"),
        *("--head", files / "head.npy"),
    )
    assert evaluated.returncode == 0, evaluated.stderr
    figures = json.loads(report.read_text())
    assert figures["accuracy"] == pytest.approx(summary["accuracy_at"])
    assert figures["full_accuracy"] == pytest.approx(summary["full_accuracy_at"])
    assert figures["precision"] == pytest.approx(summary["precision"])
    assert figures["mean_rows"] == pytest.approx(summary["mean_rows"])
    assert figures["rows"] == summary["report_rows"] and summary["on"] == "validation vectors"


def test_learning_beats_the_start_it_comes_from(files: Path, tmp_path: Path) -> None:
    """At a budget too tight for all answers, trained rows and gate do better than frozen ones."""
    head = open_head(files / "head.npy")
    training, valid = (
        open_vectors(files / f"{n}.npy", files / f"{n}.labels.npy", n_classes=N, hidden_size=D)
        for n in ("train", "valid")
    )

    def accuracy(name: str, learning_rate: float) -> float:
        changes = {"n_experts": 6, "batch_size": 100, "rows": 9.0, "keep_one": False, "epochs": 3}
        config = make_config(VectorsConfig, changes, {"learning_rate": learning_rate})
        summary = from_vectors.run(config, {}, training, valid, head, tmp_path / name)
        assert summary["mean_rows"] <= 9.5
        return float(summary["accuracy"])

    assert accuracy("learned", 0.001) > accuracy("frozen", 1e-12)


def test_an_interrupted_run_goes_on(files: Path, tmp_path: Path) -> None:
    """Both rounds are resumed: the same layer as without the break."""
    out = [*arguments(files), "--speedup", "2.5", "--set", "checkpoint_seconds=0"]
    assert dss(*out, "--out", tmp_path / "whole").returncode == 0
    process = subprocess.Popen([*DSS, *out, "--out", str(tmp_path / "broken")])
    reached = tmp_path / "broken" / "round-2" / run_folder.CHECKPOINT
    wait_until(lambda: reached.exists() or process.poll() is not None)
    assert process.poll() is None
    process.kill()
    process.wait()
    done = dss(*out, "--out", tmp_path / "broken", "--resume")
    assert done.returncode == 0, done.stderr
    whole, broken = (run_folder.load_layer(tmp_path / name) for name in ("whole", "broken"))
    assert torch.equal(whole.keys, broken.keys)
    assert torch.equal(whole.weight, broken.weight)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["--rows", "0.5"], "the least is"),
        (["--speedup", "1000"], "the least is"),
        (["--rows", "9", "--speedup", "2"], "not both"),
        (["--labels", "nowhere.npy"], "nowhere.npy"),
        (["--set", "rowz=3"], "rowz"),
    ],
)
def test_bad_input_is_a_sentence_and_writes_nothing(
    files: Path, tmp_path: Path, change: list[str], sentence: str
) -> None:
    done = dss(*arguments(files), "--out", tmp_path / "run", *change)
    assert done.returncode == 1
    assert sentence in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["train"],
        ["train", "--task", "synthetic", "--hidden", "a.npy"],
        ["train", "--hidden", "a.npy"],
        ["train", "--hidden", "a", "--labels", "b", "--head", "c", "--valid-hidden", "d"],
    ],
)
def test_wrong_usage(command: list[str]) -> None:
    assert dss(*command).returncode == 2


def test_rows_come_from_disk_as_float32(files: Path) -> None:
    array = np.load(files / "train.npy", mmap_mode="r")
    rows = MappedRows(array)[torch.tensor([5, 0, 5])]
    assert rows.dtype == torch.float32
    assert np.array_equal(rows.numpy(), array[[5, 0, 5]].astype(np.float32))


def test_budgets() -> None:
    assert mean_rows_allowed(make_config(VectorsConfig, {"rows": 9.0}), 100) == 9.0
    budget = make_config(VectorsConfig, {"speedup": 20.0, "n_experts": 2})
    assert mean_rows_allowed(budget, 100) == 3.0
    assert mean_rows_allowed(make_config(VectorsConfig), 100) == 100.0


# --- the other methods ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["mitosis", "dense"])
def test_other_methods_give_the_same_kind_of_bundle(
    files: Path, tmp_path: Path, method: str
) -> None:
    chosen = ["--experts", 4, "--method", method, "--rows", 26, "--set", "epochs=12"]
    chosen += [
        "--set",
        "stage_epochs=8",
        "--set",
        "learning_rate=0.01",
        "--set",
        "lambda_lasso=0.1",
    ]
    done = dss(*arguments(files), *chosen, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / run_folder.SUMMARY).read_text())
    growth = json.loads((tmp_path / "run" / run_folder.GROWTH).read_text())
    assert summary["method"] == method
    assert summary["accuracy"] >= summary["full_accuracy"] - 0.02
    assert summary["mean_rows"] < 32 and summary["mean_copies"] >= 1
    memory = [point["memory"] for point in growth["memory"]]
    assert summary["peak_memory"] == max(memory)
    if method == "mitosis":
        assert [stage["experts"] for stage in growth["stages"]] == [2, 4]
        assert growth["stages"][-1]["accuracy"]["1"] == summary["accuracy"]
        assert max(memory) < 2.5
    else:
        assert memory[0] == pytest.approx(4 * (1 + 1 / N)) and memory[-1] < memory[0] / 1.5
    export(tmp_path / "run", tmp_path / "models" / "own" / "1")


def test_a_budget_that_was_not_met_is_said(files: Path, tmp_path: Path) -> None:
    chosen = ["--experts", 4, "--method", "dense", "--rows", 20, "--set", "epochs=1"]
    done = dss(*arguments(files), *chosen, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "This is over the budget of 20.0 classes per answer" in done.stderr


def test_mitosis_ends_with_a_power_of_two_or_is_refused(files: Path, tmp_path: Path) -> None:
    done = dss(*arguments(files), "--method", "mitosis", "--out", tmp_path / "run")
    assert done.returncode == 1
    assert done.stderr == (
        "Error: Mitosis doubles the experts from 2 on, so it cannot end with 6.\n"
    )
    assert not (tmp_path / "run").exists()


def test_a_budget_under_one_copy_of_each_class_is_refused(files: Path, tmp_path: Path) -> None:
    chosen = ["--method", "mitosis", "--experts", 4, "--rows", 14]
    done = dss(*arguments(files), *chosen, "--out", tmp_path / "run")
    assert done.returncode == 1
    assert "score 15.0 classes per answer or more; 14.0 were asked for" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_head_with_a_bias(files: Path, tmp_path: Path) -> None:
    """The bias decides here: without it the two halves of the classes could not be told apart."""
    rng = np.random.default_rng(3)
    head = np.load(files / "head.npy")
    half = N // 2
    head[half:] = head[:half]  # each class has a twin, which a bias alone makes less likely
    bias = np.where(np.arange(N) < half, 3.0, 0.0).astype(np.float32)
    labels = rng.integers(half, size=8000)
    hidden = (head[labels] + 0.3 * rng.normal(size=(8000, D))).astype(np.float32)
    for name, array in (("h", hidden), ("y", labels), ("w", head), ("b", bias)):
        np.save(tmp_path / f"{name}.npy", array)
    vectors = ("--hidden", tmp_path / "h.npy", "--labels", tmp_path / "y.npy")
    softmax = ("--head", tmp_path / "w.npy", "--bias", tmp_path / "b.npy")
    done = dss("train", *vectors, *softmax, *SETTINGS, "--rows", 20, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / run_folder.SUMMARY).read_text())
    assert summary["full_accuracy"] > 0.7  # at most half of that without the bias
    assert summary["accuracy"] >= summary["full_accuracy"] - 0.01
    written = export(tmp_path / "run", tmp_path / "models" / "own" / "1")
    reported = held_out.put_aside(8000)[1].report
    answer = Engine(written).topk(hidden[reported], 1)
    right = (answer.classes[:, 0] == labels[reported]).mean()
    assert right == pytest.approx(summary["accuracy"], abs=1e-9)


def test_without_a_head_a_full_softmax_is_learned_first(files: Path, tmp_path: Path) -> None:
    given = arguments(files)
    without = given[: given.index("--head")] + given[given.index("--head") + 2 :]
    settings = ("--set", "head_epochs=30", "--rows", 18)
    done = dss(*without, *settings, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / run_folder.SUMMARY).read_text())
    head = np.load(tmp_path / "run" / run_folder.LEARNED_HEAD)
    hidden, labels = (np.load(files / f"valid{n}.npy")[REPORTED] for n in ("", ".labels"))
    right = ((hidden @ head.T).argmax(axis=1) == labels).mean()
    true = ((hidden @ np.load(files / "head.npy").T).argmax(axis=1) == labels).mean()
    assert summary["full_accuracy"] == pytest.approx(right)
    assert right > true - 0.1
    assert summary["accuracy"] >= summary["full_accuracy"] - 0.01
    again = dss(*without, *settings, "--out", tmp_path / "run", "--resume")
    assert again.returncode == 0, again.stderr
    export(tmp_path / "run", tmp_path / "models" / "own" / "1")


GROWTH_OF_NORMALISERS = """
import resource, sys
from pathlib import Path
import numpy as np, torch
from trainer.data.rows import MappedRows
from trainer.training.full_softmax import full_normalisers

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

torch.set_num_threads(1)
rows = MappedRows(np.ones((20_000, 8), np.float32))
head = torch.ones(10_000, 8)
full_normalisers(rows, 1_000, head, Path(sys.argv[1]) / "few.npy")
before = peak()
found = full_normalisers(rows, 20_000, head, Path(sys.argv[1]) / "many.npy")
assert torch.allclose(found, torch.tensor(8.0) + torch.tensor(10_000.0).log())
print(peak() - before)
"""


def test_normalisers_take_no_more_memory_for_more_rows(tmp_path: Path) -> None:
    """A product of all classes with a few rows is 5 MB, and there are 157 of them."""
    command = [sys.executable, "-c", GROWTH_OF_NORMALISERS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 * 1024  # kB
