"""Exports a finished run as a bundle, if the engine's answers are those of the trained layer."""

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service import bundle
from service.bundle import Bundle, Precision, TrainingFacts, flops_speedup
from service.engine import Engine
from service.errors import BundleExists, DSSError, LabelsWrong
from trainer.data import run_folder
from trainer.data.arrays import ClassesDisagree, Head, WidthsDisagree
from trainer.export.calibration import calibrate
from trainer.export.parity import (
    check_agreement,
    check_approximation,
    check_head_answers,
    check_parity,
)
from trainer.export.svd_softmax import ApproximatedLayer, Approximation
from trainer.export.training_facts import gate_facts, head_recall
from trainer.layer import DSSoftmax
from trainer.layer.head_softmax import HeadSoftmax

N_SAMPLES = 8
# They differ between runs that give the same bundle.
NOT_FACTS = {"seconds", "full_seconds", "phases"}


class NothingToApproximate(DSSError):
    pass


class NothingToCalibrate(DSSError):
    """Recall is promised of a head's own rows."""


def export(
    run: Path,
    destination: Path,
    labels: Path | None = None,
    approximation: Approximation | None = None,
    precision: Precision = "fp32",
    head: Head | None = None,
    calibration: NDArray[np.floating[Any]] | None = None,
) -> Bundle:
    """Write the run's layer as a bundle and check the answers to the run's held-out query rows.

    `head` is the full softmax; a server may compare its answers with it. A layer of the head's own
    rows ships it always.
    """
    if destination.exists():
        raise BundleExists(f"{destination} exists already; a bundle is never overwritten.")
    layer = run_folder.load_layer(run, head)
    hidden: NDArray[np.float32] = np.load(run / run_folder.HIDDEN, allow_pickle=False)
    summary = json.loads((run / run_folder.SUMMARY).read_text())
    facts = {name: value for name, value in summary.items() if name not in NOT_FACTS}
    if isinstance(layer, HeadSoftmax):
        if approximation is not None:
            raise NothingToApproximate(
                "A layer of the head's own rows is searched in whole numbers already; leave out"
                " --svd-window."
            )
        return export_head_softmax(run, destination, layer, hidden, facts, labels, calibration)
    if calibration is not None:
        raise NothingToCalibrate(
            "A layer with learned rows has no recall to promise; leave out --calibrate, or train"
            " with --objective fidelity."
        )
    gate, gate_bias = _arrays(*layer.split_bias(layer.gate))
    weight, bias = _arrays(*layer.split_bias(layer.weight))
    offsets = np.concatenate([[0], np.cumsum(layer.expert_sizes)])
    previews = approximation.previews(np.split(weight, offsets[1:-1])) if approximation else {}
    approximated = ApproximatedLayer(layer, previews) if previews else None
    if approximation and approximated:
        facts = facts_when_approximated(facts, approximation, approximated, hidden)
    facts["gates"] = gate_facts(hidden, gate, gate_bias)
    if head is not None:
        _check_head(head, layer.n_classes, hidden.shape[1])
        facts["head_recall"] = head_recall(layer, hidden, head)
    with unchecked_folder(destination) as unchecked:
        written = bundle.write(
            unchecked,
            gate=gate,
            weight=weight,
            offsets=offsets,
            classes=layer.class_of_row.numpy().astype(np.int32),
            n_classes=layer.n_classes,
            training=TrainingFacts(**facts),
            labels=read_labels(run, labels),
            samples=samples_of(hidden),
            gate_bias=gate_bias,
            bias=bias,
            previews=previews,
            precision=precision,
            head=None if head is None else head.weight,
            head_bias=None if head is None else head.bias,
        )
        if approximated is not None:
            check_approximation(approximated, Engine(written), hidden)
        elif precision == "int8":
            check_agreement(layer, Engine(written), hidden)
        else:
            check_parity(_as_stored(layer, precision), Engine(written), hidden)
        unchecked.rename(destination)
    return _moved(written, destination)


def export_head_softmax(
    run: Path,
    destination: Path,
    layer: HeadSoftmax,
    hidden: NDArray[np.float32],
    facts: dict[str, Any],
    labels: Path | None,
    calibration: NDArray[np.floating[Any]] | None,
) -> Bundle:
    """Write a layer of the head's own rows, with what recall was calibrated to."""
    gate, gate_bias = _arrays(*layer.split_bias(layer.gate))
    head, head_bias = _arrays(*layer.split_bias(layer.head))
    facts["gates"] = gate_facts(hidden, gate, gate_bias)
    facts["head_recall"] = head_recall(layer, hidden, Head(head, head_bias))
    kept = run / run_folder.CALIBRATION
    if calibration is None and kept.exists():
        calibration = np.load(kept, mmap_mode="r", allow_pickle=False)
    with unchecked_folder(destination) as unchecked:
        written = bundle.write(
            unchecked,
            objective="fidelity",
            gate=gate,
            gate_bias=gate_bias,
            offsets=np.concatenate([[0], np.cumsum(layer.expert_sizes)]),
            classes=layer.class_of_row.numpy().astype(np.int32),
            n_classes=layer.n_classes,
            head=np.ascontiguousarray(head),
            head_bias=head_bias,
            rest=layer.rest.numpy(),
            contract=None if calibration is None else calibrate(layer, calibration),
            training=TrainingFacts(**facts),
            labels=read_labels(run, labels),
            samples=samples_of(hidden),
        )
        check_head_answers(layer, Engine(written), hidden)
        unchecked.rename(destination)
    return _moved(written, destination)


@contextmanager
def unchecked_folder(destination: Path) -> Iterator[Path]:
    """Where a bundle is written and checked, under a name that no server reads as a version."""
    unchecked = destination.with_name(f".{destination.name}.unchecked")
    shutil.rmtree(unchecked, ignore_errors=True)
    try:
        yield unchecked
    finally:
        shutil.rmtree(unchecked, ignore_errors=True)


def samples_of(hidden: NDArray[np.float32]) -> NDArray[np.float32]:
    """Some rows to try the model with."""
    return hidden[np.linspace(0, len(hidden) - 1, min(N_SAMPLES, len(hidden)), dtype=int)]


def _check_head(head: Head, n_classes: int, hidden_size: int) -> None:
    classes, width = head.weight.shape
    if classes != n_classes:
        raise ClassesDisagree(f"The head has {classes} classes, the layer {n_classes}.")
    if width != hidden_size:
        raise WidthsDisagree(f"The head has rows of {width} numbers, the layer of {hidden_size}.")


def _moved(written: Bundle, destination: Path) -> Bundle:
    """The bundle as it was read and checked, in the folder that it was renamed to."""
    head = None if written.head is None else replace(written.head, path=destination)
    return replace(written, path=destination, head=head)


def _arrays(
    weight: Tensor, bias: Tensor | None
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    return weight.detach().numpy(), None if bias is None else bias.detach().numpy()


def _as_stored(layer: DSSoftmax, precision: Precision) -> DSSoftmax:
    """The layer with the numbers that the bundle has; biases are float32 always."""
    if precision == "fp16":
        layer = copy.deepcopy(layer)
        with torch.no_grad():
            for weight in layer.experts:
                stored, _ = layer.split_bias(weight)
                stored.copy_(stored.half().float())
    return layer


def facts_when_approximated(
    facts: dict[str, Any],
    approximation: Approximation,
    approximated: ApproximatedLayer,
    hidden: NDArray[np.float32],
) -> dict[str, Any]:
    """The training facts with the costs of the approximated experts.

    The accuracy is that of the exact layer, so it becomes `layer_accuracy`.
    """
    costs, utilization = approximated.costs, facts["utilization"]
    speedup = flops_speedup(approximated.n_classes, costs, utilization)
    changed = {
        "accuracy": None,
        "layer_accuracy": facts.get("accuracy"),
        "flops_speedup": speedup,
        "svd": {
            **asdict(approximation),
            "experts": len(approximated.previews),
            "agreement": approximated.agreement(hidden),
            "agreement_rows": len(hidden),
        },
    }
    if "mean_rows" in facts:
        changed["mean_rows"] = sum(c * u for c, u in zip(costs, utilization, strict=True))
    return facts | changed


def words_on_approximation(written: Bundle, approximation: Approximation) -> str:
    count = sum(preview is not None for preview in written.previews)
    words = (
        f"{count} of {written.manifest.n_experts} experts hold more than"
        f" {approximation.above} classes"
    )
    if not count:
        return f"{words}: none is approximated"
    facts = written.manifest.training
    found = facts.model_dump()["svd"]
    return (
        f"{words} and are approximated: a preview of {approximation.window} directions,"
        f" {100 * approximation.share:g}% of the classes scored exactly;"
        f" FLOPs speedup {facts.flops_speedup:.2f}x; the first answer is the layer's own for"
        f" {found['agreement']:.2%} of {found['agreement_rows']} rows"
    )


def read_labels(run: Path, labels: Path | None) -> list[str] | None:
    """The user's label file, or else the one the run wrote, if any."""
    path = labels or run / run_folder.LABELS
    if labels is None and not path.exists():
        return None
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LabelsWrong(f"{path} cannot be read as UTF-8 text.") from error
