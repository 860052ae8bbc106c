"""The synthetic task: data as the paper draws it, and the hierarchy found again."""

import json
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch

from trainer.data import run_folder
from trainer.layer import DSSoftmax
from trainer.tasks import synthetic
from trainer.training.config import make_config


def test_variances_are_those_of_the_paper() -> None:
    size = synthetic.Size(60, 40)
    items = synthetic.generate(size, 30, seed=0)  # [N, items, d]
    within_class = items.var(dim=1).mean()
    subs = items.mean(dim=1).reshape(60, 40, -1)
    within_super = subs.var(dim=1).mean()
    between_supers = subs.mean(dim=1).var(dim=0).mean()
    assert within_super / within_class == pytest.approx(10, rel=0.05)  # d^2 to d
    assert between_supers / within_class == pytest.approx(100, rel=0.05)  # d^3 to d
    assert items.var().item() == pytest.approx(1, rel=0.1)


def test_rows_are_labelled_by_sub_cluster_and_split_without_overlap() -> None:
    items = torch.arange(2 * 3 * 1.0).reshape(2, 3, 1)
    training, test = synthetic.split(items, n_test=1)
    assert training.labels.tolist() == [0, 0, 1, 1]
    assert training.inputs[:, 0].tolist() == [1, 2, 4, 5]
    assert test.labels.tolist() == [0, 1]
    assert test.inputs[:, 0].tolist() == [0, 3]


@pytest.mark.parametrize("text", ["10", "10x", "0x3", "10x10x10", "axb", "-1x2"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(synthetic.SizeUnknown):
        synthetic.parse_size(text)


def test_purity_counts_classes_in_exactly_the_right_expert() -> None:
    size = synthetic.Size(2, 3)
    layer = DSSoftmax(2, 6, 2)
    layer.gate.data = torch.tensor([[0.0, 9.0], [9.0, 0.0]])  # expert 1 serves super-cluster 0
    hidden = torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 3)
    labels = torch.arange(6)

    def purity(experts_of_class: list[set[int]]) -> float:
        held = [c in range(6) and e in experts_of_class[c] for e in range(2) for c in range(6)]
        pruned = DSSoftmax(2, 6, 2, keys=torch.tensor(held).nonzero()[:, 0])
        pruned.gate.data = layer.gate.data
        return synthetic.hierarchy(pruned, hidden, labels, size).purity

    assert purity([{1}, {1}, {1}, {0}, {0}, {0}]) == 1
    assert purity([{1}, {1}, {1, 0}, {0}, {0}, {0}]) == pytest.approx(5 / 6)  # one copy too many
    assert purity([{1}, {1}, {0}, {0}, {0}, {0}]) == pytest.approx(5 / 6)  # in the wrong one
    assert purity([{1}, {1}, set(), {0}, {0}, {0}]) == pytest.approx(5 / 6)  # lost
    found = synthetic.hierarchy(layer, hidden, labels, size)
    assert found.expert_order.tolist() == [1, 0]


@pytest.fixture(scope="module")
def run_10x10(tmp_path_factory: pytest.TempPathFactory) -> Path:
    size = synthetic.parse_size("10x10")
    config = make_config(synthetic.SyntheticConfig, synthetic.preset(size), {"seed": 5})
    folder = tmp_path_factory.mktemp("runs") / "10x10"
    synthetic.run(size, config, folder)
    return folder


def test_the_hierarchy_of_10x10_is_found(run_10x10: Path) -> None:
    summary = json.loads((run_10x10 / run_folder.SUMMARY).read_text())
    assert summary["purity"] == 1.0
    assert summary["mean_copies"] == 1.0
    assert summary["accuracy"] >= summary["full_accuracy"] - 0.005
    assert summary["flops_speedup"] >= 4.5
    assert summary["seed"] == 5 and summary["seconds"] > 0


def test_the_picture_shows_ten_blocks_on_the_diagonal(run_10x10: Path) -> None:
    pixels = matplotlib.image.imread(run_10x10 / run_folder.PICTURE)[..., :3].mean(axis=2)
    # Find the plot: the long dark frame lines bound it.
    dark_rows = np.flatnonzero((pixels < 0.5).mean(axis=1) > 0.6)
    dark_columns = np.flatnonzero((pixels < 0.5).mean(axis=0) > 0.6)
    plot = pixels[dark_rows[0] + 8 : dark_rows[-1] - 8, dark_columns[0] + 8 : dark_columns[-1] - 8]
    height, width = plot.shape
    middle = [
        [plot[int((i + 0.5) * height / 10), int((j + 0.5) * width / 10)] for j in range(10)]
        for i in range(10)
    ]
    assert np.array_equal(np.array(middle) < 0.5, np.eye(10, dtype=bool))
