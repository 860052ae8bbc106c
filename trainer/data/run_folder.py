"""A run folder: the files that training writes, and how they are read."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.errors import DSSError
from trainer.data.arrays import Head, open_head
from trainer.data.files import write_json
from trainer.layer import DSSoftmax
from trainer.layer.head_softmax import HeadSoftmax

CONFIG = "config.json"
CHECKPOINT = "checkpoint.pt"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
# gate [K,D], weight [R,D], keys [R], n_classes, biased: if so, D+1 columns. A layer of the head's
# own rows has no weight, but rest [K,D+1] and the digest of the head.
LAYER = "layer.npz"
CALIBRATION = "calibration.npy"  # held-out query rows on which recall may be calibrated, [M,D]
HIDDEN = "hidden.npy"  # held-out query rows, [S,D]
LABELS = "labels.txt"
PICTURE = "experts.png"
GROWTH = "growth.json"  # of a layer that was learned by pruning: memory and stages
LAYERS = "layers"  # of a task: one run for each layer it trained
RESULTS = "results.json"  # of a task: its tables
LEARNED_HEAD = "head.npy"  # a full softmax that was learned here, where none was given
FREE = {"threads", "checkpoint_seconds"}  # settings that a resumed run may change


class RunExists(DSSError):
    pass


class RunMissing(DSSError):
    pass


class RunUnfinished(DSSError):
    pass


class RunDiffers(DSSError):
    pass


class HeadMissing(DSSError):
    """A layer of the head's own rows is read with its head."""


class HeadDiffers(DSSError):
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
    arrays = {
        "gate": layer.gate.detach().numpy(),
        "keys": layer.keys.numpy(),
        "n_classes": np.int64(layer.n_classes),
        "biased": np.bool_(layer.biased),
    }
    if isinstance(layer, HeadSoftmax):
        arrays |= {"rest": layer.rest.numpy(), "head": np.array(digest(layer.head))}
    else:
        arrays["weight"] = layer.weight.numpy()
    np.savez(folder / LAYER, **arrays)


def load_layer(folder: Path, head: Head | None = None) -> DSSoftmax:
    """The layer of a finished run. One of the head's own rows takes the head that the run was
    given, from where it was, unless it is given here."""
    if not (folder / CONFIG).exists():
        raise RunMissing(f"{folder} holds no run; dss train --out {folder} makes one.")
    if not (folder / LAYER).exists() or not (folder / SUMMARY).exists():
        raise RunUnfinished(f"The run in {folder} has not finished; resume it first.")
    with np.load(folder / LAYER, allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    gate, keys = torch.from_numpy(found["gate"]), torch.from_numpy(found["keys"])
    biased = bool(found.get("biased", False))
    if "rest" in found:
        matrix = full_matrix(recorded_head(folder) if head is None else head)
        if digest(matrix) != str(found["head"]):
            raise HeadDiffers(f"The head is not the one that the run in {folder} learned from.")
        rest = torch.from_numpy(found["rest"])
        return HeadSoftmax(matrix, gate, keys, rest, biased=biased).eval()
    n_experts, columns = gate.shape
    layer = DSSoftmax(
        columns - biased, int(found["n_classes"]), n_experts, keys=keys, biased=biased
    )
    layer.gate.data = gate
    weight = torch.from_numpy(found["weight"])
    for expert, rows in zip(layer.experts, weight.split(layer.expert_sizes), strict=True):
        expert.data = rows
    return layer.eval()


def recorded_head(folder: Path) -> Head:
    """The head that a run was given, by the paths in its settings."""
    settings = json.loads((folder / CONFIG).read_text())
    head, bias = settings.get("head"), settings.get("bias")
    path = Path(head) if head else folder / LEARNED_HEAD
    if not path.exists():
        raise HeadMissing(f"The head of the run in {folder} is not at {path}; name it with --head.")
    return open_head(path, Path(bias) if bias else None)


def full_matrix(head: Head) -> Tensor:
    """A full softmax [N,D], or [N,D+1] with its biases in the last column."""
    weight = torch.from_numpy(head.weight)
    if head.bias is None:
        return weight
    return torch.cat([weight, torch.from_numpy(head.bias)[:, None]], dim=1)


def digest(head: Tensor) -> str:
    return sha256(head.contiguous().numpy().data).hexdigest()
