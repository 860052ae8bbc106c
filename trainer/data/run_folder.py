"""A run folder: the files that training writes, and how they are read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from service.errors import DSSError
from trainer.data.files import write_json
from trainer.layer import DSSoftmax

CONFIG = "config.json"
CHECKPOINT = "checkpoint.pt"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
LAYER = "layer.npz"  # gate [K,D], weight [R,D], keys [R], n_classes, biased: if so, D+1 columns
HIDDEN = "hidden.npy"  # held-out query rows, [S,D]
LABELS = "labels.txt"
PICTURE = "experts.png"
GROWTH = "growth.json"  # of a layer that was learned by pruning: memory and stages
LAYERS = "layers"  # of a task: one run for each layer it trained
RESULTS = "results.json"  # of a task: its tables
FREE = {"threads", "checkpoint_seconds"}  # settings that a resumed run may change


class RunExists(DSSError):
    pass


class RunMissing(DSSError):
    pass


class RunUnfinished(DSSError):
    pass


class RunDiffers(DSSError):
    pass


def open_run(folder: Path, settings: dict[str, Any], *, resume: bool) -> None:
    """Make a run folder, or check that an existing one may be resumed."""
    check_run(folder, settings, resume=resume)
    if not resume:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CONFIG, settings)


def check_run(folder: Path, settings: dict[str, Any], *, resume: bool) -> None:
    """Refuse a folder that may not be written to; writes nothing."""
    config = folder / CONFIG
    if not resume:
        if config.exists():
            raise RunExists(f"{folder} holds a run already; resume it or choose another folder.")
    elif not config.exists():
        raise RunMissing(f"{folder} holds no run to resume.")
    else:
        before = json.loads(config.read_text())
        names = {*settings, *before} - FREE
        changed = sorted(name for name in names if settings.get(name) != before.get(name))
        if changed:
            raise RunDiffers(f"The run in {folder} began with other settings: {changed}.")


def save_layer(folder: Path, layer: DSSoftmax, hidden: NDArray[np.float32]) -> None:
    np.save(folder / HIDDEN, hidden)
    np.savez(
        folder / LAYER,
        gate=layer.gate.detach().numpy(),
        weight=layer.weight.numpy(),
        keys=layer.keys.numpy(),
        n_classes=np.int64(layer.n_classes),
        biased=np.bool_(layer.biased),
    )


def load_layer(folder: Path) -> DSSoftmax:
    if not (folder / CONFIG).exists():
        raise RunMissing(f"{folder} holds no run; dss train --out {folder} makes one.")
    if not (folder / LAYER).exists() or not (folder / SUMMARY).exists():
        raise RunUnfinished(f"The run in {folder} has not finished; resume it first.")
    with np.load(folder / LAYER, allow_pickle=False) as arrays:
        gate, weight, keys = (torch.from_numpy(arrays[n]) for n in ("gate", "weight", "keys"))
        n_classes = int(arrays["n_classes"])
        biased = "biased" in arrays and bool(arrays["biased"])
    n_experts, columns = gate.shape
    layer = DSSoftmax(columns - biased, n_classes, n_experts, keys=keys, biased=biased)
    layer.gate.data = gate
    for expert, rows in zip(layer.experts, weight.split(layer.expert_sizes), strict=True):
        expert.data = rows
    return layer.eval()
