"""`dss evaluate`: perplexity, and how far log-probabilities are off; exact and promised answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from helpers import fidelity_layer as by_numpy
from helpers.fidelity_layer import a_contract, write_fidelity
from helpers.tiny_bundle import N_CLASSES, WIDTH, write_tiny
from numpy.typing import NDArray
from serving.engine.test_engine import D, N, make_bundle
from serving.engine.test_svd_experts import D as WIDE_D
from serving.engine.test_svd_experts import make_run

from service import bundle
from service.cli.main import cli
from service.engine import Engine
from service.errors import NoContract, NoHead
from service.topk import Mode
from trainer import DSSoftmax
from trainer.evaluation.measure import evaluate
from trainer.export.export import export
from trainer.export.svd_softmax import Approximation

SIZES = [20, 25, 0, 3, 40, 60, 21, 35]  # none, few, all
ROWS = 300


class Data:
    def __init__(self, folder: Path, width: int, n_classes: int) -> None:
        rng = np.random.default_rng(5)
        self.folder = folder
        self.rows = (0.5 * rng.normal(size=(ROWS, width))).astype(np.float32)
        self.classes = rng.integers(n_classes, size=ROWS)
        self.hidden = self.save("hidden", self.rows)
        self.labels = self.save("labels", self.classes)

    def keep(self, wanted: NDArray[np.bool_]) -> None:
        self.rows, self.classes = self.rows[wanted], self.classes[wanted]
        self.save("hidden", self.rows)
        self.save("labels", self.classes)

    def save(self, name: str, array: NDArray[Any]) -> Path:
        path = self.folder / f"{name}.npy"
        np.save(path, array)
        return path

    def layers_perplexity(self, path: Path) -> float:
        layer = DSSoftmax.from_bundle(path)
        with torch.no_grad():
            found = layer(torch.from_numpy(self.rows), torch.from_numpy(self.classes)).loss
        return float(found.exp())


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_with_learned_rows_a_label_that_is_not_held_scores_zero(
    tmp_path: Path, precision: bundle.Precision, biased: bool
) -> None:
    data = Data(tmp_path, D, N)
    made = make_bundle(tmp_path / "1", 3, SIZES, precision, biased)
    figures = evaluate(made.path, data.hidden, data.labels)
    assert figures["perplexity"] == pytest.approx(data.layers_perplexity(made.path), rel=1e-4)
    assert figures["full_perplexity"] is None and figures["log_prob_error"] is None
    # By the first expert, however many are searched for answers.
    more = evaluate(made.path, data.hidden, data.labels, experts_searched=2)
    assert more["perplexity"] == figures["perplexity"]


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_of_the_heads_rows_a_label_has_its_own_score(tmp_path: Path, biased: bool) -> None:
    data = Data(tmp_path, D, N)
    made = write_fidelity(tmp_path / "1", n_classes=N, width=D, biased=biased)
    assert made.rows is not None
    # For the expert without classes another answers, which the layer in PyTorch does not ask.
    layer = DSSoftmax.from_bundle(made.path)
    holds_some = torch.tensor(layer.expert_sizes)[layer.route(torch.from_numpy(data.rows)).expert]
    data.keep((holds_some > 0).numpy())
    figures = evaluate(made.path, data.hidden, data.labels)
    # The engine's normaliser is of scores in whole numbers.
    assert figures["perplexity"] == pytest.approx(data.layers_perplexity(made.path), rel=0.01)
    scores = by_numpy.all_scores(made.rows.weights, data.rows, made.rows.bias)
    full = scores - by_numpy.logsumexp(scores)[:, None]  # of the bundle's own head
    every = np.arange(len(data.rows))
    expected = np.exp(-full[every, data.classes].mean())
    assert figures["full_perplexity"] == pytest.approx(expected, rel=1e-4)
    answer = Engine(made).topk(data.rows, 1)
    error = np.abs(answer.log_probs[:, 0] - full[every, answer.classes[:, 0]]).mean()
    assert figures["log_prob_error"] == pytest.approx(error, rel=1e-3) and error > 0.01
    assert figures["precision"]["1"] < 1 and figures["full_latency_of"] == "the head"


def test_all_experts_have_no_error_worth_the_name(tmp_path: Path) -> None:
    data = Data(tmp_path, D, N)
    made = write_fidelity(tmp_path / "1", n_classes=N, width=D)
    figures = evaluate(made.path, data.hidden, data.labels, experts_searched=4)
    assert figures["precision"] == {"1": 1, "5": 1, "10": 1}
    assert figures["log_prob_error"] < 0.02


def test_a_case_worked_by_hand(tmp_path: Path) -> None:
    """Two classes with scores 1 and 2; the expert holds the first, and the rest says e^0.5."""
    made = bundle.write(
        tmp_path / "1",
        gate=np.ones((1, 1), np.float32),
        offsets=np.array([0, 1]),
        classes=np.array([0], np.int32),
        n_classes=2,
        training=bundle.TrainingFacts(utilization=[1.0], flops_speedup=1.0),
        head=np.array([[1], [2]], np.float32),
        objective="fidelity",
        rest=np.array([[0, 0.5]], np.float32),
    )
    assert made.manifest.n_experts == 1  # which is all: so that the whole head answers
    data = Data(tmp_path, 1, 2)
    data.save("hidden", np.ones((2, 1), np.float32))
    data.save("labels", np.array([0, 1]))
    figures = evaluate(made.path, data.hidden, data.labels)
    log_z = np.log(np.exp(1) + np.exp(2))
    assert figures["perplexity"] == pytest.approx(np.exp(log_z - 1.5), rel=0.01)
    assert figures["full_perplexity"] == pytest.approx(np.exp(log_z - 1.5), rel=1e-5)


def test_approximated_experts_have_no_perplexity(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    made = export(run, tmp_path / "1", approximation=Approximation(6, 0.1, 100))
    data = Data(tmp_path, WIDE_D, made.manifest.n_classes)
    assert evaluate(made.path, data.hidden, data.labels)["perplexity"] is None


# --- exact and promised answers ---------------------------------------------------------------


def test_modes_are_measured(tmp_path: Path) -> None:
    data = Data(tmp_path, D, N)
    made = write_fidelity(tmp_path / "1", n_classes=N, width=D, contract=a_contract(4))
    options = ["--hidden", str(data.hidden), "--labels", str(data.labels), "--exact"]
    options += ["--recall", "0.5", "--recall", "0.9", "--out", str(tmp_path / "out.json")]
    result = CliRunner().invoke(cli, ["evaluate", str(made.path), *options])
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "out.json").read_text())
    exact, half, most = figures["modes"]
    assert [found["asked"] for found in figures["modes"]] == ["exact", "recall 0.5", "recall 0.9"]
    assert exact["precision"] == {"1": 1, "5": 1, "10": 1}
    assert exact["rungs"]["5"] == {"sparse": 0, "escalated": 0, "exact": 1}
    answer = Engine(made).topk(data.rows, 5, mode=Mode(recall=0.9))
    assert answer.rungs is not None
    assert most["rungs"]["5"]["escalated"] == pytest.approx((answer.rungs == 1).mean())
    assert 0 < half["rungs"]["5"]["escalated"] < most["rungs"]["5"]["escalated"] < 1
    assert figures["precision"]["5"] < half["precision"]["5"] < most["precision"]["5"] < 1
    assert all(found["latency_us"] > 0 for found in figures["modes"])
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "exact 1.0000 1.0000 1.0000" in lines
    both = (f"{figures[name]:.2f}" for name in ("perplexity", "full_perplexity"))
    assert f"perplexity {', of the full softmax '.join(both)}" in lines
    assert f"log prob error {figures['log_prob_error']:.4f}, the first answer's, mean" in lines
    (line,) = [line for line in lines if line.startswith("recall 0.9 ") and "us" in line]
    assert line.endswith("us one row, top 10; 100.0% exact")  # 10 is not calibrated


def test_learned_rows_with_their_head(tmp_path: Path) -> None:
    head = np.random.default_rng(0).normal(size=(N_CLASSES, WIDTH)).astype(np.float32)
    made = write_tiny(tmp_path / "1", head=head)
    data = Data(tmp_path, WIDTH, N_CLASSES)
    figures = evaluate(made.path, data.hidden, data.labels, exact=True)
    assert figures["modes"][0]["precision"] == {"1": 1, "5": 1, "10": 1}
    given = evaluate(made.path, data.hidden, data.labels, head=data.save("head", head))
    assert given["precision"] == figures["precision"] and given["modes"] == []
    assert given["full_perplexity"] == pytest.approx(figures["full_perplexity"])


def test_what_a_bundle_cannot_is_refused(tmp_path: Path) -> None:
    data = Data(tmp_path, D, N)
    made = make_bundle(tmp_path / "1", 3, SIZES)
    with pytest.raises(NoHead):
        evaluate(made.path, data.hidden, data.labels, exact=True)
    faithful = write_fidelity(tmp_path / "2", n_classes=N, width=D)
    with pytest.raises(NoContract):
        evaluate(faithful.path, data.hidden, data.labels, recalls=(0.9,))
