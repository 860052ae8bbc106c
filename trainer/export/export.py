"""A finished run becomes a bundle, and only if the service answers as the trained layer does."""

import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from service import bundle
from service.bundle import Bundle, Precision, TrainingFacts, flops_speedup
from service.engine import Engine
from service.errors import BundleExists, LabelsWrong, ParityFailed
from service.terminal import progress
from trainer.data import run_folder
from trainer.data.arrays import ClassesDisagree, Head, WidthsDisagree, chunks
from trainer.data.run_folder import layer_inputs
from trainer.export.svd_softmax import ROWS_AT_ONCE, ApproximatedLayer, Approximation, Floats
from trainer.export.training_facts import gate_facts, head_recall
from trainer.layer import DSSoftmax

# On log-probabilities, absolute and relative: a gate with large logits rounds its own value, and
# that scales every score of the row. Classes that close may change places.
TOLERANCE = 1e-4
# An int8 expert scores its best classes exactly, but its normaliser is a sum over all of them.
INT8_TOLERANCE = 0.02
INT8_AGREEMENT = 0.999
N_SAMPLES = 8
CHECKED = ((1, 1), (10, 1), (10, 2))  # k and experts searched
NOT_FACTS = {"seconds", "full_seconds"}  # a resumed run takes other times and gives the same bundle


def export(
    run: Path,
    destination: Path,
    labels: Path | None = None,
    approximation: Approximation | None = None,
    precision: Precision = "fp32",
    head: Head | None = None,
) -> Bundle:
    """Write the run's layer as a bundle and check every answer to its test rows.

    A head is the full softmax that a server may compare its answers with.
    """
    layer, biased = run_folder.load_layer(run), run_folder.is_biased(run)
    hidden: NDArray[np.float32] = np.load(run / run_folder.HIDDEN, allow_pickle=False)
    summary = json.loads((run / run_folder.SUMMARY).read_text())
    facts = {name: value for name, value in summary.items() if name not in NOT_FACTS}
    if destination.exists():
        raise BundleExists(f"{destination} exists already; a bundle is never overwritten.")
    gate, gate_bias = _split(layer.gate.detach().numpy(), biased)
    weight, bias = _split(layer.weight.numpy(), biased)
    offsets = np.concatenate([[0], np.cumsum(layer.expert_sizes)])
    previews = approximation.previews(np.split(weight, offsets[1:-1])) if approximation else {}
    approximated = ApproximatedLayer(layer, previews, biased) if previews else None
    if approximation and approximated:
        facts = facts_when_approximated(facts, approximation, approximated, hidden)
    facts["gates"] = gate_facts(hidden, gate, gate_bias)
    if head is not None:
        _check_head(head, layer.n_classes, hidden.shape[1])
        facts["head_recall"] = head_recall(layer, layer_inputs(hidden, biased), hidden, head)
    # Checked in a folder that no server takes for a version, then renamed.
    unchecked = destination.with_name(f".{destination.name}.unchecked")
    shutil.rmtree(unchecked, ignore_errors=True)
    try:
        written = bundle.write(
            unchecked,
            gate=gate,
            weight=weight,
            offsets=offsets,
            classes=layer.class_of_row.numpy().astype(np.int32),
            n_classes=layer.n_classes,
            training=TrainingFacts(**facts),
            labels=read_labels(run, labels),
            samples=hidden[np.linspace(0, len(hidden) - 1, min(N_SAMPLES, len(hidden)), dtype=int)],
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
            check_agreement(layer, Engine(written), hidden, biased)
        else:
            check_parity(_as_stored(layer, precision, biased), Engine(written), hidden, biased)
        unchecked.rename(destination)
    finally:
        shutil.rmtree(unchecked, ignore_errors=True)
    return bundle.read(destination, head=head is not None)


def _check_head(head: Head, n_classes: int, hidden_size: int) -> None:
    classes, width = head.weight.shape
    if classes != n_classes:
        raise ClassesDisagree(f"The head has {classes} classes, the layer {n_classes}.")
    if width != hidden_size:
        raise WidthsDisagree(f"The head has rows of {width} numbers, the layer of {hidden_size}.")


def _split(
    matrix: NDArray[np.float32], biased: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    return (matrix[:, :-1], matrix[:, -1]) if biased else (matrix, None)


def _as_stored(layer: DSSoftmax, precision: Precision, biased: bool) -> DSSoftmax:
    """The layer with the numbers that the bundle has; biases are float32 always."""
    if precision == "fp16":
        layer = copy.deepcopy(layer)
        with torch.no_grad():
            for weight in layer.experts:
                stored = weight[:, :-1] if biased else weight
                stored.copy_(stored.half().float())
    return layer


def facts_when_approximated(
    facts: dict[str, Any],
    approximation: Approximation,
    approximated: ApproximatedLayer,
    hidden: NDArray[np.float32],
) -> dict[str, Any]:
    """What training measured, as far as it still holds: costs are worked out anew.

    The accuracy was the layer's own, so it goes by another name: the bundle's is not known.
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


def check_parity(
    layer: DSSoftmax, engine: Engine, hidden: NDArray[np.float32], biased: bool = False
) -> None:
    """Refuse if the engine's answers differ from the layer's own, at several k and depths."""
    for k, experts, log_probs, best, scores in _beside(layer, engine, hidden, biased):
        differences = np.abs(log_probs - best)
        if not (differences <= tolerated(log_probs)).all():
            raise ParityFailed(
                f"The bundle's log-probabilities differ from the layer's by up to"
                f" {differences.max():.2g} at k={k}, experts={experts}; nothing was exported."
            )
        # Near-ties may change places, but each class named must have the score it is given.
        wrong = ~(np.abs(scores - log_probs) <= tolerated(log_probs))
        if wrong.any():
            raise ParityFailed(
                f"The bundle's classes differ from the layer's in {wrong.any(1).sum()} rows"
                f" at k={k}, experts={experts}; nothing was exported."
            )


def check_agreement(
    layer: DSSoftmax, engine: Engine, hidden: NDArray[np.float32], biased: bool = False
) -> None:
    """Refuse int8 experts that answer other classes than the layer in more than a few rows."""
    for k, experts, log_probs, best, scores in _beside(layer, engine, hidden, biased):
        if not (np.abs(scores - log_probs) <= INT8_TOLERANCE * (1 + np.abs(scores))).all():
            raise ParityFailed(
                f"The bundle's log-probabilities differ from the layer's by more than int8 explains"
                f" at k={k}, experts={experts}; nothing was exported."
            )
        # Near-ties may change places.
        agreement = float((np.abs(scores - best) <= tolerated(best)).all(axis=1).mean())
        if agreement < INT8_AGREEMENT:
            raise ParityFailed(
                f"int8 experts answer as the layer does in {agreement:.2%} of the rows at k={k},"
                f" experts={experts}; {INT8_AGREEMENT:.1%} are needed, so nothing was exported."
            )


def _beside(
    layer: DSSoftmax, engine: Engine, hidden: NDArray[np.float32], biased: bool
) -> Iterator[tuple[int, int, Floats, Floats, Floats]]:
    """k, experts searched, and [B,k] log-probabilities: of the engine's answers by the engine, of
    the layer's own best, and of the engine's answers by the layer."""
    inputs = torch.from_numpy(layer_inputs(hidden, biased))
    for k, experts in progress.each(CHECKED, "checking answers"):
        k, experts = min(k, engine.n_reachable), min(experts, layer.n_experts)
        expected = layer.searched(inputs, k, experts)  # [B,N]
        answer = engine.topk(hidden, k, experts)
        best = expected.topk(k, dim=1).values.numpy()
        scores = np.take_along_axis(expected.numpy(), answer.classes, axis=1)
        yield k, experts, answer.log_probs, best, scores


def tolerated(log_probs: Floats) -> Floats:
    return TOLERANCE * (1 + np.abs(log_probs))


def check_approximation(
    approximated: ApproximatedLayer, engine: Engine, hidden: NDArray[np.float32]
) -> None:
    """Refuse if the engine's answers are not those of the approximated layer.

    As `check_parity`, but for what hangs on rounding: which class is the last candidate.
    """
    for k, experts in progress.each(CHECKED, "checking answers"):
        k, experts = min(k, engine.n_reachable), min(experts, engine.n_experts)
        answer = engine.topk(hidden, k, experts)
        for part in chunks(len(hidden), ROWS_AT_ONCE):
            low, high = approximated.searched(hidden[part], k, experts)  # [b,N] each
            classes, log_probs = answer.classes[part], answer.log_probs[part]  # [b,k] each
            wrong = ~_between(log_probs, _largest(low, k), _largest(high, k))
            if wrong.any():
                raise ParityFailed(
                    "The bundle's log-probabilities differ from the approximated layer's in"
                    f" {wrong.any(1).sum()} rows at k={k}, experts={experts}; nothing was exported."
                )
            named = (np.take_along_axis(bound, classes, axis=1) for bound in (low, high))
            wrong = ~_between(log_probs, *named)
            if wrong.any():
                raise ParityFailed(
                    "The bundle's classes differ from the approximated layer's in"
                    f" {wrong.any(1).sum()} rows at k={k}, experts={experts}; nothing was exported."
                )


def _largest(values: Floats, k: int) -> Floats:
    return np.sort(values, axis=1)[:, : -k - 1 : -1]  # [b,k] descending


def _between(values: Floats, low: Floats, high: Floats) -> NDArray[np.bool_]:
    tolerance = tolerated(values)
    return (values >= low - tolerance) & (values <= high + tolerance)
