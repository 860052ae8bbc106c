"""Saves a layer in a folder of its own, and loads it again: as its bundle, or as plain arrays.

Arrays are read without pickle, so nothing of a folder is ever run.

D hidden, K experts, N classes, R weight rows of all experts, w directions.
"""

import json
import shutil
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from service import bundle
from service.bundle.format import MANIFEST
from service.bundle.manifest import read_manifest
from service.bundle.signing import SIGNATURE
from service.errors import BundleError, DSSError
from trainer.layer import DSSoftmax
from trainer.layer.from_bundle import ApproximatedSoftmax, layer_from_bundle
from trainer.layer.head_softmax import HeadSoftmax

CONFIG = "layer.json"  # what the layer is; weights of "bfloat16" are stored as float32
WEIGHTS = "layer.npz"  # its weights, by their names in a state_dict
UNREADABLE = (
    OSError,
    EOFError,
    MemoryError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RuntimeError,
    zipfile.BadZipFile,
)
KINDS = {kind.__name__: kind for kind in (DSSoftmax, HeadSoftmax, ApproximatedSoftmax)}


class FolderTaken(DSSError):
    """A saved layer has a folder of its own."""


class BundleGone(DSSError):
    """The bundle of a layer is not where it was, or not what it was."""


class LayerUnknown(DSSError):
    """A subclass is not known here, so it could not be loaded again."""


class NoLayer(DSSError):
    """A folder holds no saved layer, or a damaged one."""


def save(layer: DSSoftmax, folder: Path) -> None:
    """A folder that can be seen is complete."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FolderTaken(f"{folder} holds something already; save the layer in a new folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        unfinished = Path(temporary) / "layer"
        unfinished.mkdir()
        if layer.compiled is not None:
            _copy_bundle(layer.compiled.bundle, unfinished)
        else:
            _save_arrays(layer, unfinished)
        unfinished.replace(folder)


def load(folder: Path) -> DSSoftmax:
    if (folder / MANIFEST).exists():
        return layer_from_bundle(folder)
    if not (folder / CONFIG).exists():
        raise NoLayer(f"{folder} holds no saved layer: neither {MANIFEST} nor {CONFIG}.")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        with np.load(folder / WEIGHTS, allow_pickle=False) as arrays:
            state = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        for name in config["bfloat16"]:
            state[name] = state[name].bfloat16()
        layer = _empty_layer(config, state)
        layer.load_state_dict(state, assign=True)
    except UNREADABLE as error:
        raise NoLayer(f"The layer in {folder} cannot be read: its files are damaged.") from error
    return layer.eval()


def _copy_bundle(source: Path, folder: Path) -> None:
    try:
        manifest = read_manifest(source)
        for name in (MANIFEST, SIGNATURE, *manifest.files):
            if name == SIGNATURE and not (source / name).exists():
                continue
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)
        bundle.read(folder, head=True)
    except (OSError, BundleError) as error:
        raise BundleGone(
            f"The bundle at {source}, from which this layer was loaded, cannot be copied any more:"
            " put it back, or save copy.deepcopy(layer), which keeps its weights alone."
        ) from error


def _save_arrays(layer: DSSoftmax, folder: Path) -> None:
    kind = type(layer).__name__
    if KINDS.get(kind) is not type(layer):
        raise LayerUnknown(f"A {kind} cannot be saved; only {', '.join(KINDS)} can.")
    state = {name: weight.detach().cpu() for name, weight in layer.state_dict().items()}
    half = [name for name, weight in state.items() if weight.dtype == torch.bfloat16]
    config: dict[str, Any] = {
        "kind": kind,
        "in_features": layer.in_features,
        "n_classes": layer.n_classes,
        "n_experts": layer.n_experts,
        "gate_noise": layer.gate_noise,
        "biased": layer.biased,
        "bfloat16": half,
    }
    if isinstance(layer, ApproximatedSoftmax):
        config["candidates"] = {str(e): count for e, count in layer.candidates.items()}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    arrays = {
        name: (weight.float() if name in half else weight).numpy() for name, weight in state.items()
    }
    np.savez(folder / WEIGHTS, **arrays)


def _empty_layer(config: dict[str, Any], state: dict[str, Tensor]) -> DSSoftmax:
    """A layer of the saved kind and shape, whose weights are still to be loaded."""
    kind, biased, keys = config["kind"], bool(config["biased"]), state["keys"]
    sizes = tuple(int(config[name]) for name in ("in_features", "n_classes", "n_experts"))
    width, n_classes, n_experts = sizes
    if state["gate"].shape != (n_experts, width + biased):
        raise ValueError("the gate has another shape")
    if keys.dtype != torch.int64 or not bool((keys.diff() > 0).all()):
        raise ValueError("keys do not ascend")
    if len(keys) and not 0 <= int(keys[0]) <= int(keys[-1]) < n_experts * n_classes:
        raise ValueError("keys are not pairs of experts and classes")
    layer: DSSoftmax
    if kind == "HeadSoftmax":
        head, rest = state["head"], state["rest"]
        if head.shape != (n_classes, width + biased) or rest.shape != (n_experts, width + 1):
            raise ValueError("head or rest has another shape")
        layer = HeadSoftmax(head, state["gate"], keys, rest, biased=biased)
    elif kind == "ApproximatedSoftmax":
        previewed = {
            int(e): {
                "candidates": np.array([count]),
                "P": state[f"directions.{e}"].numpy(),  # [w,D]
                "Q": state[f"previews.{e}"].numpy(),  # [V,w]
            }
            for e, count in config["candidates"].items()
        }
        layer = ApproximatedSoftmax(*sizes, keys, biased, previewed)
    elif kind == "DSSoftmax":
        layer = DSSoftmax(*sizes, keys=keys, biased=biased)
    else:
        raise ValueError("no such kind of layer")
    layer.gate_noise = float(config["gate_noise"])
    for name, weight in layer.state_dict().items():
        if weight.shape != state[name].shape:
            raise ValueError(f"{name} has another shape")
    return layer
