"""Methods that the doubly sparse layer is compared with: at their most exact they are exact."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny_bundle import rows_for
from numpy.typing import NDArray

from service import bundle
from service.engine import Engine
from trainer.baselines import adaptive, d_softmax, training
from trainer.baselines.adaptive import Adaptive
from trainer.baselines.bundle import EngineSearch
from trainer.baselines.d_softmax import Buckets, DSoftmax
from trainer.baselines.fgd import FGD, lengthened
from trainer.baselines.ivf import FaissIVF
from trainer.baselines.method import Baseline, Dial, Inputs, Options, PackageMissing, best_of
from trainer.baselines.retrained import FullRetrained, FullRows
from trainer.baselines.scan import Full, FullInt8
from trainer.baselines.scann_tree import Scann
from trainer.baselines.screening import Screening
from trainer.baselines.svd import SVD, Rotated, SVDSoftmax
from trainer.data import run_folder
from trainer.data.arrays import Head, Vectors
from trainer.evaluation.full_scan import full_topk
from trainer.training.config import VectorsConfig

N, D, M, K = 80, 16, 1200, 10


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Class c is about as frequent as 1 / (c + 1); vectors lie around their class's row."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(N, D)).astype(np.float32)
    share = 1 / np.arange(1, N + 1)
    labels = rng.choice(N, size=M, p=share / share.sum())
    hidden = (0.5 * weight[labels] + 0.5 * rng.normal(size=(M, D))).astype(np.float32)
    shuffled = rng.permutation(N)  # so that class numbers say nothing about frequency
    return Inputs(
        Vectors(hidden, shuffled[labels].astype(np.int32)),
        Head(weight[np.argsort(shuffled)], None),
        tmp_path_factory.mktemp("work"),
        "digest",
        Options(retrain_epochs=2, train_epochs=2),
    )


@pytest.fixture(scope="module")
def queries() -> NDArray[np.float32]:
    return np.random.default_rng(1).normal(size=(40, D)).astype(np.float32)


EXACT: list[tuple[type[Baseline], dict[str, float]]] = [
    (Full, {}),
    (SVD, {"window": 2, "share": 1.0}),
    (SVD, {"window": D, "share": 0.2}),
    (FGD, {"links": 16, "width": N}),
    (FaissIVF, {"lists": 8, "probes": 8}),
    (Scann, {"leaves": 40, "searched": 40, "reordered": N}),
]


@pytest.mark.parametrize(("baseline", "settings"), EXACT)
def test_the_most_exact_setting_is_the_full_softmax(
    inputs: Inputs,
    queries: NDArray[np.float32],
    baseline: type[Baseline],
    settings: dict[str, float],
) -> None:
    if baseline is Scann:
        pytest.importorskip("scann")
    search = baseline(inputs).build(Dial(settings, "exact"))
    expected = full_topk(queries, inputs.head, K)
    answer, cost = search.counted(queries, K)
    assert answer.tolist() == expected.tolist()
    assert cost > 0
    single = np.concatenate([search.topk(row[None], K) for row in queries])
    assert single.tolist() == expected.tolist()


def test_screening_holds_all_answers_it_has_seen(inputs: Inputs) -> None:
    """Every answer of the full softmax to the training rows is in the cluster they fall into."""
    search = Screening(inputs).build(Dial({"clusters": 3, "rows": N}, "all"))
    hidden = np.asarray(inputs.training.hidden[:100], np.float32)
    assert search.topk(hidden, K).tolist() == full_topk(hidden, inputs.head, K).tolist()
    assert not list(inputs.work.glob("screening*"))


def test_int8_is_nearly_exact(inputs: Inputs) -> None:
    hidden = np.asarray(inputs.training.hidden[:300], np.float32)
    found = FullInt8(inputs).build(Dial({}, "int8")).topk(hidden, 1)
    assert (found == full_topk(hidden, inputs.head, 1)).mean() > 0.95


# --- costs -------------------------------------------------------------------------------------


def test_svd_costs_what_the_paper_says() -> None:
    """Window 16 and a tenth of the classes: 5.00x on Penn Treebank, 5.38x on WikiText-2."""
    for n_classes, published in ((10_000, 5.00), (33_278, 5.38)):
        weight = np.zeros((n_classes, 200), np.float32)
        rotated = Rotated(np.zeros((200, 200), np.float32), weight, 0.0)
        search = SVDSoftmax(rotated, weight[:, :16], n_classes // 10)
        assert round(weight.size / search.multiply_adds, 2) == published


def test_d_softmax_costs_its_rows_and_the_projection() -> None:
    """2,500 rows of 200, 2,500 of 100, 5,000 of 50 are half of 10,000 of 200."""
    assert d_softmax.multiply_adds((2500, 2500, 5000), (200, 100, 50)) == 1_000_000 + 100 * 200
    assert d_softmax.multiply_adds((1, 2, 4), (8, 4, 2)) == 8 + 8 + 8 + 32


def test_lists_cost_their_middles_and_their_rows(
    inputs: Inputs, queries: NDArray[np.float32]
) -> None:
    every = FaissIVF(inputs).build(Dial({"lists": 8, "probes": 8}, "all"))
    assert every.counted(queries, K)[1] == len(queries) * (8 + N) * D
    some = FaissIVF(inputs).build(Dial({"lists": 8, "probes": 2}, "some"))
    assert len(queries) * 8 * D < some.counted(queries, K)[1] < len(queries) * (8 + N) * D


def test_a_wider_graph_search_costs_more(inputs: Inputs, queries: NDArray[np.float32]) -> None:
    graph = FGD(inputs)
    costs = [
        graph.build(Dial({"links": 4, "width": width}, "")).counted(queries, K)[1]
        for width in (10, N)
    ]
    assert 0 < costs[0] < costs[1] <= len(queries) * 2 * N * (D + 1)


def test_scann_costs_all_it_looks_at(inputs: Inputs, queries: NDArray[np.float32]) -> None:
    pytest.importorskip("scann")
    dial = Dial({"leaves": 40, "searched": 40, "reordered": 20}, "")
    cost = Scann(inputs).build(dial).counted(queries, K)[1]
    assert cost == len(queries) * (40 * D + 16 * D + N * D / 2 + 20 * D)


def test_a_bundle_costs_its_gate_and_the_experts_searched(tiny: bundle.Bundle) -> None:
    search = EngineSearch(tiny, Engine(tiny), 1)
    answer, cost = search.counted(rows_for(0, 1, 2), 2)
    assert answer.shape == (3, 2)
    assert cost == (3 * 3 + 5 + 4 + 4) * 4


# --- trained ones -------------------------------------------------------------------------------


def test_the_lazy_answer_of_adaptive_softmax_is_its_dense_one(
    queries: NDArray[np.float32],
) -> None:
    torch.manual_seed(0)
    order = np.random.default_rng(2).permutation(N)
    for cuts in ([5, 20], [12, 30]):  # also a head with fewer classes than are asked for
        layer = torch.nn.AdaptiveLogSoftmaxWithLoss(D, N, cuts, div_value=2, head_bias=True)
        dense = layer.log_prob(torch.from_numpy(queries)).topk(K).indices.numpy()
        search = adaptive.search(layer, order)
        answer, cost = search.counted(queries, K)
        assert answer.tolist() == order[dense].tolist()
        least = (cuts[0] + 2) * D * len(queries)
        tails = sum(part.weight.numel() for tail in layer.tail for part in tail)
        assert least <= cost <= least + tails * len(queries)


def test_a_cluster_that_cannot_matter_stays_closed(queries: NDArray[np.float32]) -> None:
    layer = torch.nn.AdaptiveLogSoftmaxWithLoss(D, N, [20, 40], div_value=2, head_bias=True)
    with torch.no_grad():
        layer.head.bias[20:] = -1000.0
    _, cost = adaptive.search(layer, np.arange(N)).counted(queries, K)
    assert cost == 22 * D * len(queries)


def test_adaptive_softmax_begins_as_the_head_inside_its_clusters(inputs: Inputs) -> None:
    head = torch.from_numpy(inputs.head.weight)
    layer = adaptive.start(head, [10, 30], div_value=1)
    hidden = torch.randn(5, D)
    assert torch.allclose(layer.head(hidden)[:, :10], hidden @ head[:10].T, atol=1e-5)
    assert torch.allclose(layer.tail[1](hidden), hidden @ head[30:].T, atol=1e-4)


def test_d_softmax_answers_as_the_rows_it_stands_for(
    inputs: Inputs, queries: NDArray[np.float32]
) -> None:
    """And in a space of D/4 dimensions shorter rows lose nothing."""
    head = torch.from_numpy(inputs.head.weight)
    order = torch.from_numpy(np.random.default_rng(3).permutation(N))
    flat = torch.randn(200, D // 4) @ torch.randn(D // 4, D)
    layer = Buckets(head, flat, order, (0.25, 0.25))
    assert layer.sizes == (20, 20, 40)
    own = Head(layer.rows().detach().numpy(), None)
    search = d_softmax.search(layer)
    assert search.topk(queries, K).tolist() == full_topk(queries, own, K).tolist()
    assert torch.allclose(flat @ layer.rows().T, flat @ head.T, atol=1e-3)


@pytest.mark.parametrize("baseline", [Adaptive, DSoftmax, FullRetrained])
def test_training_helps_and_is_kept(inputs: Inputs, baseline: type[Baseline]) -> None:
    """Cold rows would answer by chance; a second build trains no more."""
    method = baseline(inputs)
    dial = method.dials()[-1]
    search = method.build(dial)
    hidden = np.asarray(inputs.training.hidden, np.float32)
    hits = (search.topk(hidden, 1)[:, 0] == inputs.training.labels).mean()
    assert hits > 0.5
    assert search.train_seconds is not None and search.train_seconds > 0
    again = baseline(inputs).build(dial)
    assert again.train_seconds == search.train_seconds
    assert again.topk(hidden, K).tolist() == search.topk(hidden, K).tolist()


def test_the_control_is_better_trained_than_the_head(inputs: Inputs) -> None:
    method = FullRetrained(inputs)
    assert [dial.settings for dial in method.dials()] == [{"epochs": e} for e in (1, 2, 3, 4)]
    losses = []
    for folder in (None, method.trained):
        student = FullRows(torch.from_numpy(inputs.head.weight))
        if folder is not None:
            training.read_epoch(training.epoch_file(folder, 4), student)
        loss = training.softmax_loss(student.rows, inputs)
        hidden = torch.from_numpy(np.asarray(inputs.training.hidden))
        labels = torch.from_numpy(inputs.training.labels.astype(np.int64))
        losses.append(loss(hidden, labels, torch.Generator()).item())
    assert losses[1] < losses[0]


def test_training_goes_on_from_its_last_epoch(inputs: Inputs, tmp_path: Path) -> None:
    def train(name: str, rounds: int) -> torch.Tensor:
        student = FullRows(torch.from_numpy(inputs.head.weight))
        loss = training.softmax_loss(student.rows, inputs)
        training.fit(student, loss, inputs, tmp_path / name, rounds=rounds, epochs=2, n_rows=500)
        assert (tmp_path / name / run_folder.CHECKPOINT).exists()
        return student.weight.detach()

    train("broken", 1)
    assert torch.equal(train("broken", 2), train("whole", 2))


# --- the sampled loss ---------------------------------------------------------------------------


def test_the_mixed_loss_by_hand() -> None:
    student = torch.tensor([[0.0, 1.0, 2.0]])
    teacher = torch.tensor([[0.0, 0.0, 0.0]])
    normaliser = np.log(1 + np.e + np.e**2)
    expected = normaliser - 0.5 * 2.0 - 0.5 * 1.0
    found = training.mixed_loss(student, teacher, torch.tensor([2]), 0.5)
    assert found.item() == pytest.approx(expected, rel=1e-6)


def test_the_gradient_of_the_mixed_loss() -> None:
    rng = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, 5, generator=rng, dtype=torch.double)
    student.requires_grad_()
    target = torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(
        lambda logits: 3 * training.mixed_loss(logits, teacher, target, 0.3), (student,)
    )


def test_a_student_like_its_teacher_has_nothing_to_learn_from_any_sample() -> None:
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(N, D, generator=rng, requires_grad=True)
    hidden, labels = torch.randn(8, D, generator=rng), torch.arange(8)
    drawn = torch.randint(N, (20,), generator=rng)
    logits = training.candidate_logits(rows, hidden, labels, drawn, torch.zeros(20))
    training.mixed_loss(logits, logits.detach(), torch.zeros(8, dtype=torch.long), 1.0).backward()
    assert rows.grad is not None and rows.grad.abs().max() < 1e-6


def test_the_sampled_loss_teaches_what_the_full_one_does(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = torch.from_numpy(np.asarray(inputs.training.hidden[:200]))
    labels = torch.from_numpy(inputs.training.labels[:200].astype(np.int64))

    def gradient(seed: int) -> torch.Tensor:
        student = FullRows(0.9 * torch.from_numpy(inputs.head.weight))
        loss = training.softmax_loss(student.rows, inputs)
        loss(hidden, labels, torch.Generator().manual_seed(seed)).backward()
        assert student.weight.grad is not None
        return student.weight.grad

    full = gradient(0)
    monkeypatch.setattr(training, "SAMPLE_ABOVE", N - 1)
    samples = torch.stack([gradient(seed) for seed in range(25)])
    # One sample is off by chance; what it teaches on average is not.
    assert (samples.mean(0) - full).norm() < 0.05 * full.norm()
    assert (samples[0] - full).norm() > (samples.mean(0) - full).norm()
    assert FullRetrained(inputs).dials()[0].settings["sampled_classes"] == training.SAMPLES


# --- the rest -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("baseline", "package"), [(FGD, "faiss"), (FaissIVF, "faiss")])
def test_a_missing_package_is_named(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch, baseline: type[Baseline], package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PackageMissing, match=r"Install doubly-sparse-softmax\[baselines\]"):
        baseline(inputs)


def test_longer_rows_all_have_one_length() -> None:
    weight = np.random.default_rng(4).normal(size=(30, 5)).astype(np.float32)
    lengths = np.linalg.norm(lengthened(weight), axis=1)
    assert np.allclose(lengths, np.linalg.norm(weight, axis=1).max())


def test_the_best_of_some_scores() -> None:
    scores = np.array([[1, 3, 3, 2], [4, 0, 3, 5]], np.float32)
    assert best_of(scores, None, 3).tolist() == [[1, 2, 3], [3, 0, 2]]
    assert best_of(scores, np.array([7, 8, 9, 6]), 4).tolist() == [[8, 9, 6, 7], [6, 7, 9, 8]]
    assert best_of(scores, np.array([[7, 8, 9, 6], [1, 2, 3, 0]]), 2).tolist() == [
        [8, 9],
        [0, 1],
    ]


def test_every_dial_has_its_own_name(inputs: Inputs) -> None:
    for baseline in (SVD, FGD, FaissIVF, Screening, Adaptive, DSoftmax, FullRetrained):
        dials = baseline(inputs).dials()
        assert dials and len({dial.name for dial in dials}) == len(dials)


def test_the_loss_in_parts_is_that_of_all_logits(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "PART", 7)
    rng = torch.Generator().manual_seed(0)
    head = torch.from_numpy(inputs.head.weight)
    hidden = torch.randn(20, head.shape[1], generator=rng)
    labels = torch.randint(len(head), (20,), generator=rng)
    rows = (head + 0.1 * torch.randn(head.shape, generator=rng)).requires_grad_()
    distil = VectorsConfig().distil
    whole = training.mixed_loss(hidden @ rows.T, hidden @ head.T, labels, distil)
    (wanted,) = torch.autograd.grad(whole, rows)
    parts = training.softmax_loss(lambda: rows, inputs)(hidden, labels, rng)
    (found,) = torch.autograd.grad(parts, rows)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(found, wanted)
