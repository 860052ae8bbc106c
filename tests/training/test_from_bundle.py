"""`DSSoftmax.from_bundle`: a bundle in PyTorch answers as the engine does."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.paths import GOLDEN, ROOT
from numpy.typing import NDArray
from serving.engine.test_engine import D, N, make_bundle
from serving.engine.test_svd_experts import D as WIDE_D
from serving.engine.test_svd_experts import K as WIDE_K
from serving.engine.test_svd_experts import make_layer, make_run
from torch import nn
from torch.nn.functional import cross_entropy

from service import bundle
from service.bundle import graphs
from service.bundle.format import Precision
from service.engine import Engine
from service.errors import BundleError
from trainer import DSSoftmax
from trainer.export.export import export
from trainer.export.parity import INT8_TOLERANCE, TOLERANCE, check_agreement
from trainer.export.svd_softmax import Approximation
from trainer.layer.from_bundle import ApproximationFixed

SIZES = [20, 25, 0, 3, 40, 60, 21, 35]  # none, few, all
ASKED = [(1, 1), (5, 1), (5, 3), (N, 1)]


def rows(count: int, width: int = D) -> NDArray[np.float32]:
    return np.random.default_rng(1).normal(size=(count, width)).astype(np.float32)


def assert_same_answers(
    layer: DSSoftmax,
    engine: Engine,
    hidden: NDArray[np.float32],
    asked: list[tuple[int, int]],
    tolerance: float = TOLERANCE,
) -> None:
    """Log-probabilities are near, and classes the same wherever they are not nearer still."""
    layer = copy.deepcopy(layer)  # which computes by itself: only what was loaded has an engine
    for k, experts in asked:
        found = layer.topk(torch.from_numpy(hidden), k, experts)
        answer = engine.topk(hidden, k, experts)
        log_probs = found.log_probs.numpy()
        np.testing.assert_allclose(log_probs, answer.log_probs, rtol=tolerance, atol=tolerance)
        other = found.classes.numpy() != answer.classes
        near = np.abs(np.diff(log_probs, axis=1)) < 2 * tolerance * (1 + np.abs(log_probs[:, 1:]))
        edge = np.zeros((len(hidden), 1), bool)
        tied = np.concatenate([edge, near], 1) | np.concatenate([near, edge], 1)
        tied[:, -1] = True  # it may be tied with one that is not answered
        assert not (other & ~tied).any()
        assert other.mean() < 0.01


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_answers_are_the_engines(tmp_path: Path, precision: Precision, biased: bool) -> None:
    made = make_bundle(tmp_path / "1", 3, SIZES, precision, biased)
    layer = DSSoftmax.from_bundle(made.path)
    assert layer.biased == biased and layer.in_features == D
    assert_same_answers(layer, Engine(made), rows(300), ASKED)


def test_log_probabilities_are_the_engines(tmp_path: Path) -> None:
    """Of every class that a row's expert holds; the others share what is left."""
    made = make_bundle(tmp_path / "1", 3, SIZES, "fp32", biased=True)
    layer, engine = DSSoftmax.from_bundle(str(made.path)), Engine(made)
    hidden = rows(100)
    log_probs = layer.log_prob(torch.from_numpy(hidden)).detach().numpy()
    np.testing.assert_allclose(np.exp(log_probs).sum(axis=1), 1, rtol=1e-5)
    experts = engine.topk(hidden, 1).experts
    for row, expert in enumerate(experts):
        held = made.expert_classes(expert)
        if not len(held):
            np.testing.assert_allclose(log_probs[row], -np.log(N), rtol=1e-5)
            continue
        answer = engine.topk(hidden[row : row + 1], len(held))
        expected = dict(zip(answer.classes[0].tolist(), answer.log_probs[0], strict=True))
        found = log_probs[row, held]
        np.testing.assert_allclose(found, [expected[c] for c in held], rtol=1e-4, atol=1e-4)


def test_the_demo_of_format_1() -> None:
    made = bundle.read(ROOT / "models" / "demo" / "1")
    layer = DSSoftmax.from_bundle(made.path)
    assert made.manifest.format_version == 1 and made.samples is not None
    noise = 0.1 * rows(60, made.manifest.hidden_size)
    hidden = np.concatenate([made.samples, noise]).astype(np.float32)
    assert_same_answers(layer, Engine(made), hidden, [(1, 1), (10, 1), (10, 2)])


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_bundles_written_long_ago(precision: Precision) -> None:
    made = bundle.read(GOLDEN / precision)
    layer = DSSoftmax.from_bundle(made.path)
    assert made.samples is not None
    tolerance = INT8_TOLERANCE if precision == "int8" else TOLERANCE
    assert_same_answers(layer, Engine(made), made.samples, [(1, 1), (3, 2)], tolerance)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_int8_answers_within_what_an_export_allows(tmp_path: Path, biased: bool) -> None:
    """The layer has the rows in full; the engine rounds all but the best scores."""
    run = make_run(tmp_path / "run", biased=biased)
    made = export(run, tmp_path / "1", precision="int8")
    layer = DSSoftmax.from_bundle(made.path)
    check_agreement(layer, Engine(made), rows(500, WIDE_D))
    for number, expert in enumerate(layer.experts):
        stored = expert.detach().numpy()
        assert np.array_equal(stored[:, :WIDE_D], made.expert_weight(number))


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_approximated_experts_answer_as_the_engines_do(tmp_path: Path, biased: bool) -> None:
    run = make_run(tmp_path / "run", biased=biased)
    made = export(run, tmp_path / "1", approximation=Approximation(6, 0.1, 100))
    assert [size is not None for size in made.previews] == [True, True, False]
    layer, hidden = DSSoftmax.from_bundle(made.path), rows(500, WIDE_D)
    asked = [(1, 1), (10, 1), (10, 2), (60, WIDE_K)]
    assert_same_answers(layer, Engine(made), hidden, asked)
    # So few candidates change some answers, or this would show nothing.
    exact = make_layer(0, biased)
    log_probs = exact.topk(torch.from_numpy(hidden), 10).log_probs
    found = layer.topk(torch.from_numpy(hidden), 10).log_probs
    assert (log_probs - found).abs().max() > 0.01
    sums = layer.log_prob(torch.from_numpy(hidden)).exp().sum(dim=1)
    torch.testing.assert_close(sums, torch.ones(500), atol=1e-5, rtol=0)


def test_an_approximated_layer_cannot_be_pruned(tmp_path: Path) -> None:
    made = export(
        make_run(tmp_path / "run"), tmp_path / "1", approximation=Approximation(6, 0.1, 100)
    )
    layer = DSSoftmax.from_bundle(made.path)
    with pytest.raises(ApproximationFixed, match="cannot be pruned"):
        layer.keep_rows(torch.ones(len(layer.keys), dtype=torch.bool))


def test_some_graphs_have_a_bias_and_others_not(tmp_path: Path) -> None:
    """By hand: a gate without, two experts of which one has one."""
    made = bundle.write(
        tmp_path / "1",
        gate=np.array([[1, 0], [-1, 0]], np.float32),
        weight=np.array([[0, 1], [0, 2], [0, 3]], np.float32),
        offsets=np.array([0, 2, 3]),
        classes=np.array([0, 1, 2], np.int32),
        n_classes=3,
        training=bundle.TrainingFacts(utilization=[0.5, 0.5], flops_speedup=1.0),
        bias=np.array([5, 0, 0], np.float32),
    )
    layer = DSSoftmax.from_bundle(made.path)
    assert layer.gate.tolist() == [[1, 0, 0], [-1, 0, 0]]
    hidden = torch.tensor([[20.0, 1.0]])  # the gate is 1: scores 6, 2, and 0 for what is absent
    expected = torch.log_softmax(torch.tensor([[6.0, 2.0, 0.0]]), dim=1)
    torch.testing.assert_close(layer(hidden), expected)
    assert "bias" not in graphs.constants(made.gate_model)


def test_far_behind_experts_are_ranked_by_their_logits(tmp_path: Path) -> None:
    """Their gate values are zeros in float32; the engine goes on in the order of the logits."""
    made = bundle.write(
        tmp_path / "1",
        gate=np.array([[300.0], [0.0], [100.0]], np.float32),
        weight=np.ones((3, 1), np.float32),
        offsets=np.arange(4),
        classes=np.arange(3, dtype=np.int32),
        n_classes=3,
        training=bundle.TrainingFacts(utilization=[1.0, 0, 0], flops_speedup=1.0),
    )
    hidden = np.ones((1, 1), np.float32)
    found = DSSoftmax.from_bundle(made.path).topk(torch.from_numpy(hidden), 3)
    answer = Engine(made).topk(hidden, 3)
    assert found.classes.tolist() == answer.classes.tolist()
    np.testing.assert_allclose(found.log_probs.numpy(), answer.log_probs, rtol=1e-4)


def test_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError):
        DSSoftmax.from_bundle(tmp_path)


# --- in place of a linear layer ---------------------------------------------------------------


@pytest.fixture
def layer(tmp_path: Path) -> DSSoftmax:
    return DSSoftmax.from_bundle(make_bundle(tmp_path / "1", 3, SIZES, biased=True).path)


def test_any_leading_shape(layer: DSSoftmax) -> None:
    hidden = torch.from_numpy(rows(24))
    flat = layer(hidden)
    assert flat.shape == (24, N)
    assert torch.equal(layer(hidden.reshape(2, 3, 4, D)), flat.reshape(2, 3, 4, N))
    assert layer(hidden[0]).shape == (N,)
    torch.testing.assert_close(layer(hidden[0]), flat[0])
    assert layer(hidden[:0]).shape == (0, N)
    assert layer(hidden.bfloat16()).dtype == torch.float32


def test_what_is_done_with_logits_is_right(layer: DSSoftmax) -> None:
    hidden, target = torch.from_numpy(rows(200)), torch.arange(200) % N
    logits = layer(hidden)
    torch.testing.assert_close(torch.softmax(logits, dim=1).log(), layer.log_prob(hidden))
    torch.testing.assert_close(cross_entropy(logits, target), layer(hidden, target).loss)
    # Where some class that is held is ahead of those that are not, which have score 0.
    holds_some = torch.tensor(layer.expert_sizes)[layer.route(hidden).expert] > 0
    ahead = layer.topk(hidden, 1).log_probs[:, 0] >= logits.max(dim=1).values - 1e-6
    ahead &= holds_some
    assert ahead.float().mean() > 0.5
    assert torch.equal(logits.argmax(dim=1)[ahead], layer.predict(hidden)[ahead])


def test_a_model_learns_on_with_it(layer: DSSoftmax) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, D), layer)
    inputs, target = torch.randn(50, 4), torch.arange(50) % N
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_a_biased_layer_is_one_with_a_constant_input(layer: DSSoftmax) -> None:
    """Which is 1 in each vector."""
    plain = DSSoftmax(D + 1, N, layer.n_experts, keys=layer.keys)
    plain.load_state_dict(layer.state_dict())
    hidden = torch.from_numpy(rows(50))
    longer = torch.cat([hidden, torch.ones(50, 1)], dim=1)
    torch.testing.assert_close(layer.log_prob(hidden), plain.log_prob(longer))
    target = torch.arange(50) % N
    assert torch.equal(layer.rank_of(hidden, target), plain.rank_of(longer, target))


def test_it_is_saved_and_loaded_as_any_module(layer: DSSoftmax, tmp_path: Path) -> None:
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other = DSSoftmax(D, N, layer.n_experts, biased=True)
    other.load_state_dict(torch.load(tmp_path / "layer.pt"))
    hidden = torch.from_numpy(rows(10))
    assert torch.equal(other(hidden), layer(hidden))


def test_top_k_is_the_engines_until_a_weight_changes(tmp_path: Path) -> None:
    made = make_bundle(tmp_path / "1", 3, SIZES, "fp32", biased=False)
    layer, engine, hidden = DSSoftmax.from_bundle(made.path), Engine(made), rows(20)
    inputs = torch.from_numpy(hidden)
    answer = engine.topk(hidden, 5)
    assert np.array_equal(layer.topk(inputs, 5).log_probs.numpy(), answer.log_probs)  # bit for bit
    assert layer.compiled is not None
    assert copy.deepcopy(layer).compiled is None
    with torch.no_grad():
        layer.gate.mul_(-1.0)
    assert layer.compiled is None
    assert not np.array_equal(layer.topk(inputs, 5).classes.numpy(), answer.classes)
