"""From a trained model through `dss` and back: capture, train, export, evaluate, the model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.dss_process import dss
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from service import bundle
from service.engine import Engine
from trainer import DSSoftmax, capture
from trainer.capture.folder import Captured
from trainer.data import held_out, run_folder

N, D, CLUSTERS = 60, 12, 6
SETTINGS = ["--objective", "accuracy", "--experts", "6", "--rows", "18"]
SETTINGS += ["--set", "batch_size=100", "--set", "threads=1"]


class Classifier(nn.Module):
    """Its features are the inputs turned round, its output layer the true one, with a bias."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        turned = torch.linalg.qr(torch.randn(D, D, generator=random)).Q
        centres = 4 * torch.eye(CLUSTERS, D).repeat_interleave(N // CLUSTERS, dim=0)
        self.turn = nn.Linear(D, D, bias=False)
        self.turn.weight.data = turned
        self.fc = nn.Linear(D, N)
        self.means = centres + torch.randn(N, D, generator=random)  # [N,D]
        self.fc.weight.data = self.means @ turned.T
        self.fc.bias.data = -self.means.square().sum(dim=1) / 2

    def forward(self, inputs: Tensor) -> Tensor:
        return self.fc(self.turn(inputs))


def batches(model: Classifier, count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    labels = [torch.randint(N, (100,), generator=random) for _ in range(count)]
    noise = [0.8 * torch.randn(100, D, generator=random) for _ in range(count)]
    return [(model.means[y] + e, y) for y, e in zip(labels, noise, strict=True)]


@torch.no_grad()
def quality(model: nn.Module, held_out: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Accuracy and perplexity."""
    inputs, labels = (torch.cat(parts) for parts in zip(*held_out, strict=True))
    logits = model(inputs)
    hits = (logits.argmax(dim=1) == labels).float().mean().item()
    return hits, cross_entropy(logits, labels).exp().item()


@pytest.fixture(scope="module")
def model() -> Classifier:
    return Classifier()


@pytest.fixture(scope="module")
def captured(model: Classifier, tmp_path_factory: pytest.TempPathFactory) -> Captured:
    out = tmp_path_factory.mktemp("capture") / "out"
    return capture(model, "fc", batches(model, 30, 0), out, valid=batches(model, 5, 1))


@pytest.fixture(scope="module")
def trained(captured: Captured) -> Path:
    run = captured.folder.parent / "run"
    done = dss("train", "--capture", captured.folder, *SETTINGS, "--out", run)
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="module")
def exported(captured: Captured, trained: Path) -> Path:
    destination = captured.folder.parent / "models" / "own" / "1"
    done = dss("export", trained, destination, "--capture", captured.folder)
    assert done.returncode == 0, done.stderr
    return destination


def test_a_folder_stands_for_its_files(captured: Captured, trained: Path) -> None:
    config = json.loads((trained / run_folder.CONFIG).read_text())
    for name in ("hidden", "labels", "head", "bias"):
        assert config[name] == str(captured.folder / f"{name}.npy")
    summary = json.loads((trained / run_folder.SUMMARY).read_text())
    assert summary["on"] == "validation vectors"
    assert run_folder.load_layer(trained).biased


def test_the_full_softmax_is_shipped(exported: Path, captured: Captured) -> None:
    head = bundle.read(exported, head=True).head
    assert head is not None
    hidden = np.load(captured.hidden)[:50]
    logits = hidden @ np.load(captured.head).T + np.load(captured.folder / "bias.npy")
    assert np.array_equal(Engine(head).topk(hidden, 1).classes[:, 0], logits.argmax(axis=1))


def test_what_was_put_aside_is_evaluated(
    exported: Path, captured: Captured, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    done = dss("evaluate", exported, "--capture", captured.folder, "--out", report)
    assert done.returncode == 0, done.stderr
    figures = json.loads(report.read_text())
    assert captured.valid_rows == 500
    chosen_on = held_out.in_halves(500).choice
    assert figures["rows"] == 500 - len(chosen_on) > 250
    assert figures["accuracy"]["1"] >= figures["full_accuracy"]["1"] - 0.02
    assert figures["flops_speedup"] > 2


def test_without_any_put_aside_all_are_evaluated(
    model: Classifier, exported: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    capture(model, "fc", batches(model, 2, 2), out)
    done = dss("evaluate", exported, "--capture", out, "--out", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["rows"] == 200


def test_rows_that_were_learned_from_are_not_evaluated(
    model: Classifier, exported: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    capture(model, "fc", batches(model, 10, 2), out)
    done = dss("evaluate", exported, "--capture", out, "--out", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert rows == len(held_out.put_aside(1000)[1].report)


def test_the_model_with_the_sparse_head_is_as_good(model: Classifier, exported: Path) -> None:
    held_out = batches(model, 20, 3)
    accuracy, perplexity = quality(model, held_out)
    assert 0.5 < accuracy < 1 and perplexity > 1  # there is something to lose
    sparse = Classifier()
    sparse.fc = DSSoftmax.from_bundle(exported)  # type: ignore[assignment]
    sparse_accuracy, sparse_perplexity = quality(sparse, held_out)
    assert sparse_accuracy >= accuracy - 0.02
    assert sparse_perplexity <= 1.2 * perplexity
    inputs = held_out[0][0]
    with torch.no_grad():
        hidden = sparse.turn(inputs)
    answer = Engine(bundle.read(exported)).topk(hidden.numpy(), 1)
    # But for rows in which no class that is held scores above 0, the score of all others.
    same = sparse(inputs).argmax(dim=1).numpy() == answer.classes[:, 0]
    assert same.mean() >= 0.98


@pytest.mark.parametrize(
    ("command", "status", "sentence"),
    [
        (["train", "--capture", "OUT", "--hidden", "a.npy"], 2, "a file for --hidden already"),
        (["train", "--capture", "OUT", "--task", "synthetic"], 2, "one of --task, --capture"),
        (["train", "--capture", "nowhere"], 1, "nowhere holds no capture"),
        (["export", "run", "1", "--capture", "OUT", "--bias", "b"], 2, "for --bias already"),
        (["evaluate", "BUNDLE", "--capture", "OUT", "--labels", "b"], 2, "for --labels already"),
        (["evaluate", "BUNDLE"], 2, "Give --capture, or --hidden and --labels"),
    ],
)
def test_wrong_usage(captured: Captured, command: list[str], status: int, sentence: str) -> None:
    done = dss(*(str(captured.folder) if word == "OUT" else word for word in command))
    assert done.returncode == status
    assert sentence in " ".join(done.stderr.split()) and "Traceback" not in done.stderr
