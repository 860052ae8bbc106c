"""A finished run becomes a bundle, and only if the service answers as the trained layer does."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from service import bundle
from service.bundle import Bundle, TrainingFacts
from service.engine import Engine
from service.errors import BundleExists, LabelsWrong, ParityFailed
from trainer import runs
from trainer.layer import DSSoftmax

TOLERANCE = 1e-4  # on log-probabilities; classes that close may change places
N_SAMPLES = 8
NOT_FACTS = {"seconds", "full_seconds"}  # a resumed run takes other times and gives the same bundle


def export(run: Path, destination: Path, labels: Path | None = None) -> Bundle:
    """Write the run's layer as a bundle and check every answer to its test rows."""
    layer = runs.load_layer(run)
    hidden: NDArray[np.float32] = np.load(run / runs.HIDDEN, allow_pickle=False)
    summary = json.loads((run / runs.SUMMARY).read_text())
    facts = {name: value for name, value in summary.items() if name not in NOT_FACTS}
    if destination.exists():
        raise BundleExists(f"{destination} exists already; a bundle is never overwritten.")
    # Checked in a folder that no server takes for a version, then renamed.
    unchecked = destination.with_name(f".{destination.name}.unchecked")
    shutil.rmtree(unchecked, ignore_errors=True)
    try:
        written = bundle.write(
            unchecked,
            gate=layer.gate.detach().numpy(),
            weight=layer.weight.numpy(),
            offsets=np.concatenate([[0], np.cumsum(layer.expert_sizes)]),
            classes=layer.class_of_row.numpy().astype(np.int32),
            n_classes=layer.n_classes,
            training=TrainingFacts(**facts),
            labels=read_labels(run, labels),
            samples=hidden[np.linspace(0, len(hidden) - 1, min(N_SAMPLES, len(hidden)), dtype=int)],
        )
        check_parity(layer, Engine(written), hidden)
        unchecked.rename(destination)
    finally:
        shutil.rmtree(unchecked, ignore_errors=True)
    return bundle.read(destination)


def read_labels(run: Path, labels: Path | None) -> list[str] | None:
    """The user's label file, or else the one the run wrote, if any."""
    path = labels or run / runs.LABELS
    if labels is None and not path.exists():
        return None
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LabelsWrong(f"{path} cannot be read as UTF-8 text.") from error


def check_parity(layer: DSSoftmax, engine: Engine, hidden: NDArray[np.float32]) -> None:
    """Refuse if the engine's answers differ from the layer's own, at several k and depths."""
    for k, experts in ((1, 1), (10, 1), (10, 2)):
        k, experts = min(k, engine.n_reachable), min(experts, layer.n_experts)
        expected = layer.searched(torch.from_numpy(hidden), k, experts)  # [B,N]
        answer = engine.topk(hidden, k, experts)
        best = expected.topk(k, dim=1).values.numpy()
        difference = np.abs(answer.log_probs - best).max()
        if not difference <= TOLERANCE:
            raise ParityFailed(
                f"The bundle's log-probabilities differ from the layer's by {difference:.2g}"
                f" at k={k}, experts={experts}; nothing was exported."
            )
        # Near-ties may change places, but each class named must have the score it is given.
        scores = np.take_along_axis(expected.numpy(), answer.classes, axis=1)  # [B,k]
        wrong = ~(np.abs(scores - answer.log_probs) <= TOLERANCE)
        if wrong.any():
            raise ParityFailed(
                f"The bundle's classes differ from the layer's in {wrong.any(1).sum()} rows"
                f" at k={k}, experts={experts}; nothing was exported."
            )
