"""The loop: the same seed gives the same layer, broken off or not."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.dss_process import dss
from helpers.server import wait_until

from trainer.data import run_folder
from trainer.layer import DSSoftmax
from trainer.tasks import synthetic
from trainer.training.checkpoints import Progress, Traffic
from trainer.training.config import (
    ConfigInvalid,
    TrainConfig,
    make_config,
    parse_setting,
    read_toml,
)
from trainer.training.loop import (
    Interrupted,
    epoch_batches,
    gate_noise,
    lasso_pressure,
    may_sparsify,
    train,
    watch_budget,
)

SIZE = synthetic.parse_size("3x4")
DSS = [sys.executable, "-m", "service.cli"]


def config(**changes: object) -> synthetic.SyntheticConfig:
    small = {
        "n_experts": 3,
        "items_per_class": 20,
        "test_items_per_class": 5,
        "epochs": 8,
        "batch_size": 30,
        "gate_noise_epochs": 4,
        "sparsify_from_epoch": 3,
        "prune_every": 3,
        "prune_threshold": 0.05,
        "learning_rate": 0.01,
        "lambda_lasso": 0.05,
        "checkpoint_seconds": 0,
    }
    return make_config(synthetic.SyntheticConfig, small, changes)


def run(folder: Path, settings: synthetic.SyntheticConfig, *, resume: bool = False) -> dict:  # type: ignore[type-arg]
    return synthetic.run(SIZE, settings, folder, resume=resume, baseline=False)


def assert_same_layer(first: Path, second: Path) -> None:
    one, two = run_folder.load_layer(first), run_folder.load_layer(second)
    assert torch.equal(one.keys, two.keys)
    assert torch.equal(one.weight, two.weight)
    assert torch.equal(one.gate, two.gate)


@pytest.mark.parametrize("step", [1, 25, 60])
@pytest.mark.parametrize("rescue_every", [0, 10])
def test_an_interrupted_run_resumed_equals_an_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, rescue_every: int
) -> None:
    settings = config(rescue_every=rescue_every, sparsify_below=2.0)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run(whole, settings)

    steps = 0
    original = torch.optim.Adam.step

    def interrupting(self: torch.optim.Adam, *args: object, **kwargs: object) -> object:
        nonlocal steps
        steps += 1
        if steps == step:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", interrupting)
    with pytest.raises(Interrupted):
        run(broken, settings)
    assert not (broken / run_folder.LAYER).exists()
    torch.manual_seed(99)  # resuming depends on the checkpoint alone
    found = run(broken, settings, resume=True)

    assert_same_layer(whole, broken)
    untimed = {"seconds": 0, "phases": {}}
    assert found | untimed == expected | untimed
    assert (whole / run_folder.METRICS).read_text() == (broken / run_folder.METRICS).read_text()


def test_a_killed_process_resumed_gives_the_same_bundle(tmp_path: Path) -> None:
    """kill -9 in the middle, then `dss train --resume` and `dss export`, as a user would."""

    def run(*command: object) -> None:
        done = dss(*command)
        assert done.returncode == 0, done.stderr

    arguments = ["train", "--task", "synthetic", "--size", "3x4", "--no-baseline"]
    for setting in ["epochs=12", "items_per_class=20", "batch_size=20", "checkpoint_seconds=0"]:
        arguments += ["--set", setting]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(*arguments, "--out", whole)

    process = subprocess.Popen([*DSS, *arguments, "--out", broken], stderr=subprocess.PIPE)
    metrics = broken / run_folder.METRICS
    wait_until(
        lambda: process.poll() is not None or (metrics.exists() and metrics.read_text() != "")
    )
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert not (broken / run_folder.SUMMARY).exists()
    run(*arguments, "--out", broken, "--resume")

    for folder in (whole, broken):
        target = tmp_path / "models" / folder.name / "1"
        run("export", folder, target)
    manifests = [
        json.loads((tmp_path / "models" / name / "1" / "manifest.json").read_text())
        for name in ("whole", "broken")
    ]
    assert manifests[0]["files"] == manifests[1]["files"]
    assert manifests[0]["training"] == manifests[1]["training"]


def test_seeds_matter_and_repeat(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(tmp_path / name, config(seed=seed))
    assert_same_layer(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / run_folder.LAYER).read_bytes() != (
        tmp_path / "c" / run_folder.LAYER
    ).read_bytes()


def test_folders_are_neither_overwritten_nor_resumed_with_other_settings(tmp_path: Path) -> None:
    with pytest.raises(run_folder.RunMissing):
        run(tmp_path / "a", config(), resume=True)
    run(tmp_path / "a", config(epochs=1))
    with pytest.raises(run_folder.RunExists):
        run(tmp_path / "a", config(epochs=1))
    folder, settings = tmp_path / "settings", {"epochs": 3, "threads": 1}
    run_folder.open_run(folder, settings, resume=False)
    run_folder.check_run(folder, settings | {"threads": 2}, resume=True)  # only how, not what
    with pytest.raises(run_folder.RunDiffers, match="epochs"):
        run(tmp_path / "a", config(epochs=2), resume=True)


def test_metrics_have_a_line_an_epoch(tmp_path: Path) -> None:
    run(tmp_path / "a", config())
    lines = [
        json.loads(line) for line in (tmp_path / "a" / run_folder.METRICS).read_text().splitlines()
    ]
    assert [line["epoch"] for line in lines] == list(range(1, 9))
    assert {"task", "load", "lasso", "expert", "rows", "flops_speedup"} <= lines[-1].keys()
    assert lines[-1]["rows"] == sum(lines[-1]["expert_sizes"]) < lines[0]["rows"]


@pytest.mark.parametrize("keep_one", [True, False])
def test_keep_one_can_be_switched(tmp_path: Path, keep_one: bool) -> None:
    """With a threshold that no row reaches, everything goes, or one copy of each class stays."""
    layer = train_alone(tmp_path, config(prune_threshold=1e9, keep_one=keep_one))
    assert sorted(layer.class_of_row.tolist()) == (list(range(12)) if keep_one else [])


def test_nothing_is_pruned_while_the_task_loss_is_above_the_threshold(tmp_path: Path) -> None:
    never = config(sparsify_from_epoch=None, sparsify_below=0.0, prune_threshold=1e9)
    run(tmp_path / "a", never)
    assert run_folder.load_layer(tmp_path / "a").expert_sizes == [12, 12, 12]


def test_the_proximal_option_gives_exact_zeros(tmp_path: Path) -> None:
    settings = config(proximal=True, lambda_lasso=5.0, lambda_expert=0.0, prune_threshold=0.0)
    layer = train_alone(tmp_path, settings)
    assert (layer.weight == 0).all(dim=1).any()


def train_alone(folder: Path, settings: synthetic.SyntheticConfig) -> DSSoftmax:
    """Only the loop, without the evaluation that follows it in a run."""
    data, _ = synthetic.split(synthetic.generate(SIZE, 10, seed=0), 2)
    torch.manual_seed(0)
    layer = DSSoftmax(synthetic.HIDDEN_SIZE, SIZE.n_classes, 3)
    train(settings, synthetic.make_encoder(), layer, data, folder)
    return layer


# --- small rules ------------------------------------------------------------------------------


def test_sparsity_begins_by_loss_or_by_epoch() -> None:
    by_loss = TrainConfig(sparsify_below=0.5)
    assert not may_sparsify(by_loss, Progress(task_loss=0.6), epoch=50)
    assert may_sparsify(by_loss, Progress(task_loss=0.4), epoch=0)
    by_epoch = TrainConfig(sparsify_below=0.0, sparsify_from_epoch=4.5)
    assert not may_sparsify(by_epoch, Progress(task_loss=0.1), epoch=4.4)
    assert may_sparsify(by_epoch, Progress(task_loss=9.0), epoch=4.5)
    unsettled = TrainConfig(sparsify_below=0.5, rescue_every=10)
    assert not may_sparsify(unsettled, Progress(task_loss=0.1), epoch=0)
    assert may_sparsify(unsettled, Progress(task_loss=0.1, settled=True), epoch=0)


def test_the_lassos_press_harder_until_the_budget_is_met() -> None:
    layer = DSSoftmax(2, 10, 2)  # 10 classes in both
    tallies = Traffic(torch.zeros(20), torch.zeros(2), torch.tensor([30.0, 10.0]))
    progress, settings = Progress(sparsifying=True), TrainConfig(pressure_growth=1.5)
    watch_budget(settings, layer, tallies, progress, 8.0)
    watch_budget(settings, layer, tallies, progress, 8.0)
    assert progress.pressure == lasso_pressure(progress) == 2.25
    assert tallies.recent_load.tolist() == [7.5, 2.5]  # what was seen longer ago counts less
    layer.keep_rows(torch.arange(20) >= 3)  # 3/4 * 7 + 1/4 * 10 = 7.75
    watch_budget(settings, layer, tallies, progress, 8.0)
    assert lasso_pressure(progress) == 0 and progress.pressure == 2.25
    watch_budget(settings, layer, tallies, progress, 7.5)  # traffic may move, so it may begin anew
    assert lasso_pressure(progress) == pytest.approx(3.375)


def test_a_run_with_a_budget_ends_within_it(tmp_path: Path) -> None:
    settings = config(lambda_lasso=0.02, sparsify_from_epoch=1, prune_every=2, epochs=20)
    data, _ = synthetic.split(synthetic.generate(SIZE, 10, seed=0), 2)
    torch.manual_seed(0)
    layer = DSSoftmax(synthetic.HIDDEN_SIZE, SIZE.n_classes, 3)
    progress = train(settings, synthetic.make_encoder(), layer, data, tmp_path, budget=9.0)
    assert progress.rows[0] == 36 and progress.rows[-1] == len(layer.keys) < 36
    assert not progress.over_budget


def test_a_layer_within_its_budget_loses_nothing(tmp_path: Path) -> None:
    settings = config(prune_threshold=1e9, sparsify_from_epoch=1, prune_every=1)
    data, _ = synthetic.split(synthetic.generate(SIZE, 10, seed=0), 2)
    layer = DSSoftmax(synthetic.HIDDEN_SIZE, SIZE.n_classes, 3)
    train(settings, synthetic.make_encoder(), layer, data, tmp_path, budget=12.5)
    assert layer.expert_sizes == [12, 12, 12]


def test_noise_falls_to_zero() -> None:
    settings = TrainConfig(gate_noise=2.0, gate_noise_epochs=4)
    assert [gate_noise(settings, epoch) for epoch in (0, 1, 4, 9)] == [2.0, 1.5, 0.0, 0.0]
    assert gate_noise(TrainConfig(gate_noise_epochs=0), 0) == 0.0


def test_batches_cover_every_row_once_and_differ_by_epoch() -> None:
    first, second = (torch.cat(epoch_batches(100, 30, 0, epoch)) for epoch in (0, 1))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(100))
    assert not torch.equal(first, second)
    assert torch.equal(first, torch.cat(epoch_batches(100, 30, 0, 0)))


# --- settings ---------------------------------------------------------------------------------


def test_toml_holds_differences_and_unknown_keys_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("epochs = 3\nkeep_one = false\n")
    found = make_config(TrainConfig, read_toml(file), parse_setting("epochs=4"))
    assert (found.epochs, found.keep_one, found.batch_size) == (4, False, TrainConfig().batch_size)
    with pytest.raises(ConfigInvalid, match="epoch_count"):
        make_config(TrainConfig, {"epoch_count": 3})
    with pytest.raises(ConfigInvalid, match="epochs"):
        make_config(TrainConfig, {"epochs": "many"})
    with pytest.raises(ConfigInvalid, match="name=value"):
        parse_setting("epochs")
    file.write_text("epochs =")
    with pytest.raises(ConfigInvalid, match="not TOML"):
        read_toml(file)
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        read_toml(tmp_path / "none.toml")
