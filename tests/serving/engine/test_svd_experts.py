"""Approximated experts and biases, from a run to the engine."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from helpers.tiny_bundle import with_classes
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from service import bundle, errors
from service.bundle import TrainingFacts
from service.bundle.graphs import Preview, PreviewSize
from service.cli import inspect
from service.cli.main import cli
from service.engine import Engine, onnx_sessions
from service.engine.onnx_sessions import OnnxBackend
from service.telemetry.metrics.registry import Metrics
from trainer.data import run_folder
from trainer.evaluation.measure import evaluate
from trainer.export import export as exporting
from trainer.export import svd_softmax
from trainer.export.export import export
from trainer.export.parity import check_approximation
from trainer.export.svd_softmax import ApproximatedLayer, Approximation, preview
from trainer.layer import DSSoftmax

N, D, K = 300, 16, 3
SIZES = [120, 200, 40]
BIASES = pytest.mark.parametrize("biased", [False, True])


def low_rank(rng: np.random.Generator, size: int, width: int) -> NDArray[np.float32]:
    """Rows with a few strong directions, as trained ones have."""
    matrix = rng.normal(size=(size, width)) * 0.7 ** np.arange(width)
    turned = matrix @ np.linalg.qr(rng.normal(size=(width, width)))[0]
    return turned.astype(np.float32)


def make_layer(seed: int, biased: bool) -> DSSoftmax:
    rng = np.random.default_rng(seed)
    keys = [e * N + np.sort(rng.choice(N, size, replace=False)) for e, size in enumerate(SIZES)]
    layer = DSSoftmax(D, N, K, keys=torch.from_numpy(np.concatenate(keys)), biased=biased)
    layer.gate.data = torch.from_numpy(rng.normal(size=(K, D + biased)).astype(np.float32))
    for expert, size in zip(layer.experts, SIZES, strict=True):
        expert.data = torch.from_numpy(low_rank(rng, size, D + biased))
    return layer.eval()


def make_run(folder: Path, seed: int = 0, biased: bool = False) -> Path:
    folder.mkdir()
    run_folder.save_layer(folder, make_layer(seed, biased), rows(100))
    (folder / run_folder.CONFIG).write_text("{}")
    utilization = [0.5, 0.25, 0.25]
    summary = {
        "utilization": utilization,
        "flops_speedup": bundle.flops_speedup(N, SIZES, utilization),
        "accuracy": 0.75,
        "mean_rows": 120.0,
    }
    (folder / run_folder.SUMMARY).write_text(json.dumps(summary))
    return folder


def rows(count: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(count, D)).astype(np.float32)


# Along the first axis the classes are 4, 0, 3 and 0.
HAND = np.array([[4, 0], [0, 1], [3, 0], [0, -1]], np.float32)
HAND_PREVIEW = Preview(np.array([[1, 0]], np.float32), HAND[:, :1], candidates=2)


# --- from a run to the engine ----------------------------------------------------------------

APPROXIMATION = Approximation(window=6, share=0.25, above=100)
# Experts 0 and 1: 6 + V * 6 / 16 + V / 4.
COSTS = (6 + 45 + 30, 6 + 75 + 50, 40)


def test_a_bias_is_the_last_column_of_the_layer(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", biased=True)
    assert np.load(run / run_folder.HIDDEN).shape[1] == D
    written = export(run, tmp_path / "1")
    assert written.manifest.hidden_size == D
    layer, hidden = run_folder.load_layer(run), rows(150, seed=9)
    assert layer.biased and layer.in_features == D
    for k, experts in ((1, 1), (7, 1), (50, 2)):
        expected = layer.topk(torch.from_numpy(hidden), k, experts)
        answer = Engine(written).topk(hidden, k, experts)
        np.testing.assert_allclose(answer.log_probs, expected.log_probs.numpy(), atol=1e-5)
        assert np.array_equal(answer.classes, expected.classes.numpy())


def test_a_run_from_before_there_were_biases_has_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with np.load(run / run_folder.LAYER) as arrays:
        old = {name: arrays[name] for name in arrays.files if name != "biased"}
    np.savez(run / run_folder.LAYER, **old)
    assert not run_folder.load_layer(run).biased
    before = export(run, tmp_path / "1")
    after = export(make_run(tmp_path / "again"), tmp_path / "2")
    assert before.manifest.files == after.manifest.files


@BIASES
def test_an_approximated_run_is_served(tmp_path: Path, biased: bool) -> None:
    """Every answer against the rule spelled out in plain loops."""
    run = make_run(tmp_path / "run", biased=biased)
    written = export(run, tmp_path / "1", approximation=APPROXIMATION)
    assert written.previews == (PreviewSize(6, 30), PreviewSize(6, 50), None)
    assert written.expert_costs == COSTS
    assert bundle.read(tmp_path / "1").previews == written.previews
    layer, hidden = run_folder.load_layer(run), rows(60, seed=4)
    for k, experts in ((1, 1), (5, 1), (5, 2), (45, 1), (130, 2)):
        answer = Engine(written).topk(hidden, k, experts)
        for row in range(60):
            expected = spelled_out(layer, biased, hidden[row], k, experts)
            assert answer.classes[row].tolist() == [cls for cls, _ in expected]
            np.testing.assert_allclose(
                answer.log_probs[row], [value for _, value in expected], atol=2e-5
            )


def spelled_out(
    layer: DSSoftmax, biased: bool, row: NDArray[np.float32], k: int, experts: int
) -> list[tuple[int, float]]:
    gate = layer.gate.detach().double().numpy()
    weights = [expert.detach().double().numpy() for expert in layer.experts]
    offsets = list(pairwise(np.cumsum([0, *SIZES])))
    logits = gate[:, :D] @ row + (gate[:, D] if biased else 0)
    gates = np.exp(logits) / np.exp(logits).sum()
    ranked = np.argsort(-gates)
    best: dict[int, float] = {}
    for rank, expert in enumerate(ranked):
        if rank >= experts and len(best) >= k:
            break
        weight, temperature = weights[expert][:, :D], gates[ranked[0]]
        bias = weights[expert][:, D] if biased else 0
        exact = temperature * (weight @ row + bias)
        used = exact
        candidates = np.arange(len(weight))
        if len(weight) > APPROXIMATION.above:
            _, _, directions = np.linalg.svd(weight)
            cheap = temperature * (weight @ directions[:6].T @ directions[:6] @ row + bias)
            candidates = np.argsort(-cheap)[: max(k, len(weight) // 4)]
            used = cheap.copy()
            used[candidates] = exact[candidates]
        normaliser = np.log(np.exp(used).sum() + N - len(weight))
        classes = layer.class_of_row.numpy()[slice(*offsets[expert])]
        for candidate in candidates:
            value = exact[candidate] - normaliser + np.log(gates[expert] / temperature)
            cls = int(classes[candidate])
            best[cls] = max(best.get(cls, -np.inf), value)
    return sorted(best.items(), key=lambda item: -item[1])[:k]


@BIASES
def test_the_engine_answers_in_batches_as_one_by_one(tmp_path: Path, biased: bool) -> None:
    run = make_run(tmp_path / "run", biased=biased)
    answering = Engine(export(run, tmp_path / "1", approximation=APPROXIMATION))
    hidden = rows(257)
    for k, experts in ((1, 1), (60, 2), (answering.n_reachable, 1)):
        together = answering.topk(hidden, k, experts)
        for size in (1, 7, 64):
            for first in range(0, 257, size):
                part = slice(first, first + size)
                alone = answering.topk(hidden[part], k, experts)
                assert np.array_equal(alone.classes, together.classes[part])
                assert np.array_equal(alone.log_probs, together.log_probs[part])


def test_many_rows_are_taken_in_parts_that_fit_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    answering = Engine(export(run, tmp_path / "1", approximation=APPROXIMATION))
    hidden = rows(100)
    taken: list[tuple[int, int]] = []  # expert and rows of each part
    parts_of = OnnxBackend._parts

    def noted(
        self: OnnxBackend, expert: int, k: int, group: NDArray[np.int64]
    ) -> Iterator[NDArray[np.int64]]:
        for part in parts_of(self, expert, k, group):
            taken.append((expert, len(part)))
            yield part

    monkeypatch.setattr(OnnxBackend, "_parts", noted)
    together = answering.topk(hidden, 5)
    assert len(taken) == len({expert for expert, _ in taken})
    whole = taken.copy()
    taken.clear()
    monkeypatch.setattr(onnx_sessions, "GATHERED_AT_ONCE", 50 * D * 3)
    parts = answering.topk(hidden, 5)
    # Five rows of expert 0's 30 candidates, three of expert 1's 50, expert 2 gathers none.
    most = {0: 5, 1: 3, 2: 100}
    assert all(count <= most[expert] for expert, count in taken)
    assert len(taken) > len(whole)
    assert parts.expert_rows.tolist() == together.expert_rows.tolist()
    assert (parts.expert_rows > 0).all()
    assert np.array_equal(parts.classes, together.classes)
    assert np.array_equal(parts.log_probs, together.log_probs)
    monkeypatch.setattr(onnx_sessions, "GATHERED_AT_ONCE", 1)  # less than one row needs
    assert np.array_equal(answering.topk(hidden, 5).log_probs, together.log_probs)


def test_costs_are_counted_everywhere(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    written = export(run, tmp_path / "1", approximation=APPROXIMATION)
    speedup = N / (0.5 * COSTS[0] + 0.25 * COSTS[1] + 0.25 * COSTS[2] + K)
    facts = written.manifest.training.model_dump()
    assert facts["flops_speedup"] == pytest.approx(speedup)
    assert facts["mean_rows"] == pytest.approx(N / speedup - K)
    # The accuracy was measured on the layer as it was trained.
    assert (facts["accuracy"], facts["layer_accuracy"]) == (None, 0.75)
    svd_facts = facts["svd"]
    assert 0.5 < svd_facts.pop("agreement") <= 1
    expected = {"window": 6, "share": 0.25, "above": 100, "experts": 2, "agreement_rows": 100}
    assert svd_facts == expected

    described = inspect.describe(written)
    assert described["flops_speedup"] == pytest.approx(speedup)
    assert [expert["cost"] for expert in described["experts"]] == list(COSTS)
    lines = [" ".join(line.split()) for line in inspect.table(described).splitlines()]
    assert "experts 3, 2 of them approximated by SVD" in lines
    assert lines[-4:] == [
        "expert classes cost utilization",
        "0 120 81.0 50.00%",
        "1 200 131.0 25.00%",
        "2 40 40.0 25.00%",
    ]

    hidden = rows(80)
    answer = Engine(written).topk(hidden, 1)
    share = np.bincount(answer.experts, minlength=K) / 80
    registry = CollectorRegistry()
    live = Metrics(registry).model("words", 1, written)
    live.executed([0.0], 80, 0.1, answer)
    labels = {"model": "words", "version": "1"}
    found = registry.get_sample_value("dss_flops_speedup_ratio", labels)
    assert found == pytest.approx(N / (share @ COSTS + K))
    cost = registry.get_sample_value("dss_expert_cost_rows", labels | {"expert": "1"})
    assert cost == COSTS[1]
    assert registry.get_sample_value("dss_expert_classes", labels | {"expert": "1"}) == 200


def test_evaluate_counts_costs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    few = Approximation(window=2, share=0.02, above=100)  # 3 and 4 candidates
    written = export(run, tmp_path / "1", approximation=few)
    hidden = rows(80)
    np.save(tmp_path / "hidden.npy", hidden)
    np.save(tmp_path / "labels.npy", np.zeros(80, np.int64))
    figures = evaluate(tmp_path / "1", tmp_path / "hidden.npy", tmp_path / "labels.npy")
    share = np.bincount(Engine(written).topk(hidden, 1).experts, minlength=K) / 80
    previewed = [2 + 120 * 2 / D, 2 + 200 * 2 / D]
    for k, candidates in (("1", (3, 4)), ("5", (5, 5)), ("10", (10, 10))):
        costs = [*np.add(previewed, candidates), 40]
        assert figures["mean_rows_at"][k] == pytest.approx(share @ costs)
    assert figures["mean_rows"] == figures["mean_rows_at"]["1"]
    assert figures["flops_speedup"] == pytest.approx(N / (figures["mean_rows"] + K))


# --- export's own check ----------------------------------------------------------------------


@BIASES
def test_without_previews_the_reference_is_the_layer(biased: bool) -> None:
    layer, hidden = make_layer(5, biased), rows(50)
    reference = ApproximatedLayer(layer, {})
    for k, experts in ((1, 1), (60, 2), (130, 1)):
        expected = layer.searched(torch.from_numpy(hidden), k, experts).numpy()
        low, high = reference.searched(hidden, k, experts)
        np.testing.assert_array_equal(low, high)
        np.testing.assert_allclose(low, expected, atol=1e-4)
    assert reference.agreement(hidden) == 1
    assert reference.costs == SIZES


def test_candidates_that_hang_on_rounding_may_be_either() -> None:
    scores = np.array([[4.0, 3.0, 1.0, 1.0 - 1e-7, 0.0], [4.0, 3.0, 2.0, 1.0, 0.0]])
    surely, maybe = svd_softmax._candidates(scores, 3)
    assert surely.tolist() == [[True, True, False, False, False], [True, True, True, False, False]]
    assert maybe.tolist() == [[True, True, True, True, False], [True, True, True, False, False]]
    surely, maybe = svd_softmax._candidates(scores, 5)
    assert surely.all() and maybe.all()


def test_agreement_counts_first_answers_that_stay() -> None:
    """One direction, one candidate: right where the strongest direction decides."""
    layer = DSSoftmax(2, 4, 1)
    layer.gate.data = torch.zeros(1, 2)
    layer.experts[0].data = torch.from_numpy(HAND)
    reference = ApproximatedLayer(layer, {0: preview(HAND, 1, 0.25)})
    # The layer says 0, 1, 0 and 3; by the first axis it would be 0, 0, 0 and 0.
    hidden = np.array([[1, 0], [1, 5], [2, 1], [1, -5]], np.float32)
    assert reference.agreement(hidden) == 0.5


@pytest.mark.parametrize("damage", ["directions", "weight", "fewer", "rows"])
def test_another_preview_than_the_layers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    original = bundle.write

    def wrong_write(path: Path, **arrays: object) -> bundle.Bundle:
        previews: dict[int, Preview] = dict(arrays["previews"])  # type: ignore[call-overload]
        shown = previews[1]
        if damage == "directions":
            previews[1] = Preview(shown.directions[::-1], shown.weight, shown.candidates)
        elif damage == "weight":
            previews[1] = Preview(
                shown.directions, shown.weight * np.float32(1.01), shown.candidates
            )
        elif damage == "fewer":
            previews[1] = Preview(shown.directions, shown.weight, 20)
        else:
            arrays["weight"] = arrays["weight"] * np.float32(1.01)  # type: ignore[operator]
        return original(path, **arrays | {"previews": previews})  # type: ignore[arg-type]

    run = make_run(tmp_path / "run")
    monkeypatch.setattr(exporting.bundle, "write", wrong_write)
    with pytest.raises(errors.ParityFailed, match="differ from the approximated layer's"):
        export(run, tmp_path / "models" / "1", approximation=APPROXIMATION)
    assert list((tmp_path / "models").iterdir()) == []


def test_wrong_classes_alone_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    written = export(run, tmp_path / "1", approximation=APPROXIMATION)
    layer, hidden = run_folder.load_layer(run), np.load(run / run_folder.HIDDEN)
    weights = [expert.detach().numpy() for expert in layer.experts]
    reference = ApproximatedLayer(layer, APPROXIMATION.previews(weights))
    check_approximation(reference, Engine(written), hidden)
    rolled = Engine(with_classes(written, lambda classes: np.roll(classes, 1)))
    with pytest.raises(errors.ParityFailed, match=r"classes differ .* at k=1, experts=1"):
        check_approximation(reference, rolled, hidden)


# --- the command -----------------------------------------------------------------------------


def test_the_command_tells_how_many_experts_were_approximated(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", biased=True)
    options = ["--svd-window", "6", "--svd-share", "0.25"]
    done = CliRunner().invoke(
        cli, ["export", str(run), str(tmp_path / "1"), *options, "--svd-above", "100"]
    )
    assert done.exit_code == 0
    first, second = done.output.splitlines()
    assert first.endswith("the service's answers equal the approximated layer's")
    assert second.startswith(
        "2 of 3 experts hold more than 100 classes and are approximated: a preview of 6 directions,"
        " 25% of the classes scored exactly; FLOPs speedup 3.48x; the first answer is the layer's"
    )
    done = CliRunner().invoke(cli, ["export", str(run), str(tmp_path / "2"), *options])
    assert done.exit_code == 0
    first, second = done.output.splitlines()
    assert first.endswith("the service's answers equal the layer's")
    assert second == "0 of 3 experts hold more than 1000 classes: none is approximated"
    # Nothing to approximate: the bundle is the plain one.
    plain = export(run, tmp_path / "3")
    facts = bundle.read(tmp_path / "2").manifest
    assert (facts.files, facts.training) == (plain.manifest.files, plain.manifest.training)


def test_impossible_approximations_are_told_and_nothing_is_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for window, share, expected in (
        (0, 0.5, svd_softmax.WindowOutOfRange),
        (D + 1, 0.5, svd_softmax.WindowOutOfRange),
        (2, 0.0, svd_softmax.ShareOutOfRange),
        (2, 1.5, svd_softmax.ShareOutOfRange),
    ):
        with pytest.raises(expected):
            export(run, tmp_path / "1", approximation=Approximation(window, share))
    for options in (["--svd-window", "2"], ["--svd-share", "0.5"]):
        done = CliRunner().invoke(cli, ["export", str(run), str(tmp_path / "1"), *options])
        assert done.exit_code == 2
        assert "--svd-window and --svd-share go together." in done.output
    assert not (tmp_path / "1").exists()


def test_a_hand_made_bundle_with_everything(tmp_path: Path) -> None:
    """Written without a trainer: gate bias, class bias, one approximated expert, one plain."""
    facts = TrainingFacts(utilization=[0.5, 0.5], flops_speedup=1)
    written = bundle.write(
        tmp_path / "1",
        gate=np.zeros((2, 2), np.float32),
        gate_bias=np.array([0, 50], np.float32),  # every row goes to expert 1
        weight=np.concatenate([HAND, HAND]),
        bias=np.array([0, 0, 0, 0, 0, 0, 0, 10], np.float32),
        offsets=np.array([0, 4, 8]),
        classes=np.array([0, 1, 2, 3, 2, 3, 4, 5], np.int32),
        n_classes=6,
        training=facts,
        previews={1: HAND_PREVIEW},
    )
    assert written.expert_costs == (4, 1 + 2 + 2)
    assert inspect.describe(written)["flops_speedup"] == 6 / (0.5 * 4 + 0.5 * 5 + 2)
    answer = Engine(written).topk(np.array([[1, 5]], np.float32), 2)
    assert answer.experts.tolist() == [1]
    assert answer.classes.tolist() == [[5, 2]]
    normaliser = np.log(np.exp(4) + 1 + np.exp(3) + np.exp(5) + 2)
    np.testing.assert_allclose(answer.log_probs, [[5 - normaliser, 4 - normaliser]], atol=1e-6)
