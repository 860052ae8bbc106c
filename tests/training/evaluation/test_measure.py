"""`dss evaluate` on bundles whose every figure can be worked out by hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.tiny_bundle import N_CLASSES, SIZES, rows_for
from numpy.typing import NDArray

from service import bundle
from service.cli.main import cli
from trainer.evaluation import full_scan, measure
from trainer.evaluation.measure import evaluate, table

N = 12
EXPERTS = ([0, 1, 2, 3, 4], [5, 6, 7, 8])  # nobody holds 9, 10 and 11


def write_bundle(
    path: Path, gate: NDArray[np.float32], head: NDArray[np.float32], experts: tuple[list[int], ...]
) -> Path:
    """Experts that hold rows of the head as they are."""
    classes = np.concatenate(experts).astype(np.int32)
    share = [1 / len(experts)] * len(experts)
    bundle.write(
        path,
        gate=gate,
        weight=head[classes],
        offsets=np.cumsum([0, *map(len, experts)]),
        classes=classes,
        n_classes=len(head),
        training=bundle.TrainingFacts(utilization=share, flops_speedup=1),
    )
    return path


def row(favourite: int) -> NDArray[np.float32]:
    """Logits of the identity head: the favourite first, then 0, 1, 2, ..."""
    logits = (N - np.arange(N)) / 100
    logits[favourite] += 1
    return logits.astype(np.float32)


class Case:
    """Four rows; the gate sends 0 and 1 to expert 0, 6 and 10 to expert 1."""

    def __init__(self, folder: Path) -> None:
        gate = np.zeros((2, N), np.float32)
        gate[0, :5] = gate[1, 5:] = 10
        head = np.eye(N, dtype=np.float32)
        self.folder = folder
        self.bundle = write_bundle(folder / "bundle", gate, head, EXPERTS)
        self.head = self.save("head", head)
        self.hidden = self.save("hidden", np.stack([row(0), row(6), row(10), row(1)]))
        self.labels = self.save("labels", np.array([0, 6, 10, 7]))
        self.out = folder / "out.json"

    def save(self, name: str, array: NDArray[Any]) -> Path:
        path = self.folder / f"{name}.npy"
        np.save(path, array)
        return path

    def arguments(self) -> list[str]:
        paths = {"--hidden": self.hidden, "--labels": self.labels, "--head": self.head}
        options = [text for option, path in paths.items() for text in (option, str(path))]
        return ["evaluate", str(self.bundle), *options, "--out", str(self.out)]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def untimed(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if not name.endswith("latency_us")}


def test_every_figure_by_hand(case: Case) -> None:
    figures = evaluate(case.bundle, case.hidden, case.labels, head=case.head)
    # Row 10 finds 5 instead; the label 7 is not in the expert of row 1. Nine classes can be found.
    assert figures["accuracy"] == {"1": 2 / 4, "5": 2 / 4, "10": None}
    # 7 is not among 1, 0, 2, 3, 4, but it is among the first ten.
    assert figures["full_accuracy"] == {"1": 3 / 4, "5": 3 / 4, "10": 4 / 4}
    # Top 5 of row 6: 6, 5, 7, 8, 0 against 6, 0, 1, 2, 3; of row 10: 5, 6, 7, 8, 0 against 10, 0...
    assert figures["precision"] == {"1": 3 / 4, "5": (5 + 2 + 1 + 5) / 20, "10": None}
    assert figures["reachable_recall"] == 2 / 4
    assert figures["mean_rows"] == (5 + 4 + 4 + 5) / 4
    # Expert 1 holds four classes, so for five the engine goes on to expert 0.
    assert figures["mean_rows_at"] == {"1": 4.5, "5": (5 + 9 + 9 + 5) / 4, "10": None}
    assert figures["flops_speedup"] == 12 / (4.5 + 2)
    assert figures["latency_us"] > 0 and figures["full_latency_us"] > 0
    assert (figures["latency_k"], figures["full_latency_of"]) == (5, "the head")
    assert (figures["rows"], figures["n_classes"], figures["n_experts"]) == (4, 12, 2)
    assert figures["experts_searched"] == 1
    assert figures["bundle"] == str(case.bundle)
    assert figures["machine"].keys() >= {"cpu", "cores", "python", "onnxruntime", "numpy"}


def test_more_experts_searched_reach_more_at_more_cost(case: Case) -> None:
    figures = evaluate(case.bundle, case.hidden, case.labels, experts_searched=2)
    assert figures["reachable_recall"] == 3 / 4  # all but class 10, which nobody holds
    assert figures["mean_rows"] == 9
    assert figures["mean_rows_at"] == {"1": 9, "5": 9, "10": None}
    assert figures["flops_speedup"] == 12 / (9 + 2)
    assert figures["experts_searched"] == 2


def test_without_a_head_nothing_is_said_of_its_answers(case: Case) -> None:
    figures = evaluate(case.bundle, case.hidden, case.labels)
    assert figures["full_accuracy"] is None and figures["precision"] is None
    assert figures["accuracy"] == {"1": 2 / 4, "5": 2 / 4, "10": None}
    assert figures["full_latency_us"] > 0
    assert figures["full_latency_of"] == "random weights of the same shape"


def test_the_bias_belongs_to_the_full_softmax(case: Case) -> None:
    bias = np.zeros(N, np.float32)
    bias[7] = 100
    path = case.save("bias", bias)
    figures = evaluate(case.bundle, case.hidden, case.labels, head=case.head, bias=path)
    assert figures["full_accuracy"]["1"] == 1 / 4  # it says 7 to every row
    assert figures["precision"]["1"] == 0


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_one_expert_with_everything_is_the_full_softmax(case: Case, kind: type) -> None:
    rng = np.random.default_rng(0)
    head = rng.normal(size=(40, 8)).astype(np.float32)
    path = write_bundle(
        case.folder / "whole", np.ones((1, 8), np.float32), head, (list(range(40)),)
    )
    hidden = case.save("rows", rng.normal(size=(300, 8)).astype(kind))
    labels = case.save("classes", rng.integers(40, size=300).astype(np.int16))
    figures = evaluate(path, hidden, labels, head=case.save("weights", head))
    assert figures["precision"] == {"1": 1, "5": 1, "10": 1}
    assert figures["accuracy"] == figures["full_accuracy"]
    assert 0 < figures["accuracy"]["1"] < figures["accuracy"]["10"] < 1
    assert figures["reachable_recall"] == 1
    assert figures["mean_rows"] == 40
    assert figures["flops_speedup"] == 40 / 41


def test_data_in_many_small_parts_gives_the_same(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate(case.bundle, case.hidden, case.labels, head=case.head)
    monkeypatch.setattr(full_scan, "LOGITS_AT_ONCE", 15)  # three rows for the engine, one in full
    parts = evaluate(case.bundle, case.hidden, case.labels, head=case.head)
    assert untimed(parts) == untimed(whole)


def test_a_class_held_twice_is_reached_by_both_ways(tiny: bundle.Bundle, case: Case) -> None:
    hidden = case.save("rows", rows_for(0, 1, 2, 2))
    labels = case.save("classes", np.array([0, 0, 0, 11]))  # expert 1 does not hold class 0
    figures = evaluate(tiny.path, hidden, labels)
    assert figures["reachable_recall"] == 3 / 4
    assert figures["mean_rows"] == (SIZES[0] + SIZES[1] + 2 * SIZES[2]) / 4
    assert figures["flops_speedup"] == N_CLASSES / (figures["mean_rows"] + 3)


def test_the_table_tells_what_the_json_does(case: Case) -> None:
    result = CliRunner().invoke(cli, case.arguments())
    assert result.exit_code == 0
    written = json.loads(case.out.read_text())
    assert result.output == table(written) + "\n"
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "top 1 top 5 top 10" in lines
    assert "accuracy 0.5000 0.5000 -" in lines
    assert "full softmax 0.7500 0.7500 1.0000" in lines
    assert "precision 0.7500 0.6500 -" in lines
    assert "classes scored 4.5 7.0 -" in lines
    assert "rows 4, 1 of 2 experts searched" in lines
    assert "reachable recall 0.5000" in lines
    assert "mean rows 4.5 of 12 classes" in lines
    assert "FLOPs speedup 1.85x" in lines
    assert not [path for path in case.folder.iterdir() if path.suffix == ".tmp"]


def test_the_table_without_a_head(case: Case) -> None:
    lines = table(evaluate(case.bundle, case.hidden, case.labels)).splitlines()
    assert "full softmax - - -" in [" ".join(line.split()) for line in lines]


def test_it_runs_without_torch(case: Case) -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"  # as if it were not installed
        f"sys.argv = ['dss', *{case.arguments()}]\n"
        "from service.cli.main import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "reachable recall" in done.stdout
    assert json.loads(case.out.read_text())["reachable_recall"] == 2 / 4


def empty(shape: tuple[int, ...]) -> NDArray[np.float32]:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--experts-searched", 0, "experts is 0; this model searches from 1 to 2."),
        ("--experts-searched", 3, "experts is 3; this model searches from 1 to 2."),
        ("--hidden", None, "bad.npy does not exist."),
        ("--hidden", empty((4, 3)), "bad.npy has vectors of 3 numbers, not of 12."),
        ("--hidden", empty((4, N)) + np.nan, "bad.npy has a NaN or an infinity in row 0."),
        ("--labels", np.array([0, 1, 2, N]), "bad.npy has the label 12 in row 3;"),
        ("--head", empty((N + 1, N)), "bad.npy has 13 classes, but the bundle has 12 of them."),
        ("--head", empty((N, 9)), "bad.npy takes vectors of 9 numbers, but the bundle of 12."),
        ("--bias", empty((N + 1,)), "bad.npy has 13 classes, but"),
    ],
)
def test_bad_input_is_told_in_a_sentence_and_nothing_is_written(
    case: Case, option: str, value: NDArray[Any] | int | None, told: str
) -> None:
    if isinstance(value, np.ndarray):
        case.save("bad", value)
    given = str(value) if isinstance(value, int) else str(case.folder / "bad.npy")
    assert_refused(case, [*case.arguments(), option, given], told)


def test_a_folder_that_is_no_bundle(case: Case) -> None:
    command, _, *options = case.arguments()
    assert_refused(case, [command, str(case.folder), *options], "so it is not a bundle.")


def assert_refused(case: Case, arguments: list[str], told: str) -> None:
    case.out.write_text("as before")
    before = {path: path.stat().st_mtime_ns for path in case.folder.rglob("*")}
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ") and result.stderr.endswith(".\n")
    assert result.stderr.count("\n") == 1
    assert told in result.stderr
    assert {path: path.stat().st_mtime_ns for path in case.folder.rglob("*")} == before
    assert case.out.read_text() == "as before"


def test_a_bias_needs_its_head(case: Case) -> None:
    path = case.save("bias", np.zeros(N, np.float32))
    with pytest.raises(measure.BiasWithoutHead):
        evaluate(case.bundle, case.hidden, case.labels, bias=path)


def test_an_output_that_cannot_be_is_refused_before_any_work(case: Case) -> None:
    for output in (case.folder, case.folder / "none" / "out.json", case.hidden / "out.json"):
        with pytest.raises(measure.OutputImpossible):
            # The bundle is not even looked at.
            evaluate(case.folder / "no bundle", case.hidden, case.labels, output=output)


def test_an_output_that_fails_late_leaves_no_part(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(measure.OutputImpossible):
        evaluate(case.bundle, case.hidden, case.labels, output=case.out)
    assert not [path for path in case.folder.iterdir() if path.name.endswith(("json", "tmp"))]
