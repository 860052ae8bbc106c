"""`dss evaluate`: what a bundle answers and costs on a user's vectors, beside the full softmax.

Works without PyTorch: the answers are those of the engine that serves the bundle.

B query rows, D hidden, K experts, N classes, k answers, g experts searched.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from service import bundle as bundles
from service.bundle import Bundle
from service.bundle.manifest import RECALL_AT, read_manifest
from service.engine import Engine
from service.errors import DSSError
from service.system.machine import machine
from service.terminal import progress
from service.topk import SPARSE, Mode
from trainer.data.arrays import (
    ClassesDisagree,
    Head,
    Vectors,
    VectorsInvalid,
    WidthsDisagree,
    chunks,
    open_head,
    open_vectors,
)
from trainer.data.files import write_json
from trainer.data.held_out import unseen
from trainer.evaluation.full_scan import full_answers, full_scan, rows_at_once
from trainer.evaluation.log_probs import LabelLogProbs
from trainer.evaluation.modes import ModeCounts, asked_modes, words
from trainer.evaluation.timing import timed

TIMED_ROWS = 1000
MOST_NATS = 700.0  # a mean loss beyond which a perplexity is no finite number

PerK = dict[str, float | None]  # by k; None where the model cannot answer so many


class BiasWithoutHead(VectorsInvalid):
    pass


class OutputImpossible(DSSError):
    pass


@dataclass
class Counts:
    """Sums over the rows seen so far; the last four are by k.

    Log-probabilities are of labels, and `log_prob_error` of the bundle's first answers: how far
    they are from those of the full softmax, whatever their sign.
    """

    reachable: int = 0
    searched: float = 0
    log_prob: float = 0
    full_log_prob: float = 0
    log_prob_error: float = 0
    hits: dict[int, int] = field(default_factory=lambda: dict.fromkeys(RECALL_AT, 0))
    full_hits: dict[int, int] = field(default_factory=lambda: dict.fromkeys(RECALL_AT, 0))
    shared: dict[int, int] = field(default_factory=lambda: dict.fromkeys(RECALL_AT, 0))
    scored: dict[int, float] = field(default_factory=lambda: dict.fromkeys(RECALL_AT, 0.0))


def evaluate(
    path: Path,
    hidden: Path,
    labels: Path,
    *,
    head: Path | None = None,
    bias: Path | None = None,
    experts_searched: int = 1,
    exact: bool = False,
    recalls: tuple[float, ...] = (),
    output: Path | None = None,
    validation_rows: bool | None = None,
) -> dict[str, Any]:
    """Check every input, measure, and write the figures to `output` if all went well.

    Exact answers and promised recalls are measured besides, if asked for. Without a head the
    bundle's own is the full softmax, if it ships one.

    If a layer was trained with these files, they are its `validation_rows` or those it learned
    from: then only rows count that it has not seen and that no choice was made on.
    """
    if bias is not None and head is None:
        raise BiasWithoutHead(f"{bias} is a bias without a head.")
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise OutputImpossible(f"{output} cannot be written: it is a folder or lies in none.")
    manifest = read_manifest(path)
    bundle = bundles.read(path, head=manifest.rows_folder is not None, manifest=manifest)
    engine, modes = Engine(bundle), asked_modes(exact, recalls)
    nothing = np.zeros((1, engine.hidden_size), np.float32)
    engine.check(nothing, 1, experts_searched)
    for mode in modes:
        engine.check(nothing, 1, 1, mode)
    full = _own_head(bundle) if head is None else _matching_head(head, bias, engine)
    vectors = open_vectors(
        hidden, labels, n_classes=engine.n_classes, hidden_size=engine.hidden_size
    )
    if validation_rows is not None:
        rows = unseen(len(vectors.labels), given=validation_rows)
        vectors = Vectors(vectors.hidden[rows], vectors.labels[rows])
    figures = measure(bundle, engine, vectors, full, experts_searched, modes)
    if output is not None:
        _write_json(output, figures)
    return figures


def _own_head(bundle: Bundle) -> Head | None:
    return None if bundle.rows is None else Head(bundle.rows.weights, bundle.rows.bias)


def _matching_head(path: Path, bias: Path | None, engine: Engine) -> Head:
    head = open_head(path, bias)
    n_classes, hidden_size = head.weight.shape
    if n_classes != engine.n_classes:
        raise ClassesDisagree(
            f"{path} has {n_classes} classes, but the bundle has {engine.n_classes} of them."
        )
    if hidden_size != engine.hidden_size:
        raise WidthsDisagree(
            f"{path} takes vectors of {hidden_size} numbers, but the bundle of"
            f" {engine.hidden_size}."
        )
    return head


def measure(
    bundle: Bundle,
    engine: Engine,
    vectors: Vectors,
    head: Head | None,
    experts_searched: int,
    modes: Sequence[Mode] = (),
) -> dict[str, Any]:
    rows, n_classes = len(vectors.labels), engine.n_classes
    of_modes = [ModeCounts(engine, mode) for mode in modes]
    labels = LabelLogProbs(bundle)
    counts = _count(bundle, engine, vectors, head, experts_searched, labels, of_modes)
    mean_rows = counts.searched / rows
    answered = [k for k in RECALL_AT if k <= engine.n_reachable]
    latency_k = answered[-1]
    (latency_us, *mode_us), full_latency_us = _latencies(
        engine, vectors, head, latency_k, experts_searched, modes
    )
    return {
        "bundle": str(bundle.path),
        "rows": rows,
        "n_classes": n_classes,
        "n_experts": engine.n_experts,
        "experts_searched": experts_searched,
        "accuracy": _per_k(counts.hits, answered, rows),
        "full_accuracy": None
        if head is None
        else _per_k(counts.full_hits, [k for k in RECALL_AT if k <= n_classes], rows),
        "precision": None
        if head is None
        else {str(k): counts.shared[k] / (k * rows) if k in answered else None for k in RECALL_AT},
        # Of the labels. The bundle's by each row's first expert: see log_probs.
        "perplexity": _perplexity(counts.log_prob, rows) if labels.known else None,
        "full_perplexity": None if head is None else _perplexity(counts.full_log_prob, rows),
        # Of each row's first answer, against the full softmax: the mean of absolute differences.
        "log_prob_error": None if head is None else counts.log_prob_error / rows,
        "modes": [
            counted.figures(rows, latency)
            for counted, latency in zip(of_modes, mode_us, strict=True)
        ],
        "reachable_recall": counts.reachable / rows,
        # Classes scored exactly, or multiply-adds worth as many where an expert is approximated.
        "mean_rows": mean_rows,
        # More than mean_rows where a row's experts hold fewer than k classes, so that the engine
        # goes on to further ones.
        "mean_rows_at": _per_k(counts.scored, answered, rows),
        "flops_speedup": n_classes / (mean_rows + engine.n_experts),
        "latency_k": latency_k,
        "latency_us": latency_us,
        "full_latency_us": full_latency_us,
        "full_latency_of": "the head" if head is not None else "random weights of the same shape",
        "machine": machine("onnxruntime", "numpy"),
    }


def _perplexity(log_prob: float, rows: int) -> float:
    return math.exp(min(MOST_NATS, -log_prob / rows))


def _per_k(sums: Mapping[int, float], possible: list[int], rows: int) -> PerK:
    return {str(k): sums[k] / rows if k in possible else None for k in RECALL_AT}


def _count(
    bundle: Bundle,
    engine: Engine,
    vectors: Vectors,
    head: Head | None,
    experts_searched: int,
    label_log_probs: LabelLogProbs,
    of_modes: Sequence[ModeCounts],
) -> Counts:
    counts = Counts()
    gate = _gate_session(bundle)
    sizes = np.array(engine.expert_sizes, np.int64)  # [K]
    costs = np.array(bundle.expert_costs)  # [K]
    # One number for each (expert, class) pair that the bundle holds, ascending as they are stored.
    held = np.repeat(np.arange(engine.n_experts), sizes) * engine.n_classes + bundle.classes  # [R]
    wanted = np.array([experts_searched])
    most = min(RECALL_AT[-1], engine.n_classes)
    parts = list(chunks(len(vectors.labels), rows_at_once(int(sizes.max()))))
    for part in progress.each(parts, "answering"):
        hidden = np.ascontiguousarray(vectors.hidden[part], np.float32)  # [B,D]
        labels = vectors.labels[part].astype(np.int64)[:, None]  # [B,1]
        ranked = gate.run(["expert"], {"hidden": hidden, "g": wanted})[0]  # [B,g]
        counts.searched += float(costs[ranked].sum())
        counts.reachable += int(_contains(held, ranked * engine.n_classes + labels).any(1).sum())
        first = engine.topk(hidden, 1, experts_searched)
        best = None  # [B,10]
        if head is not None:
            asked = np.concatenate([labels, first.classes], axis=1)  # [B,2]
            best, log_probs = full_answers(hidden, head, most, asked)
            counts.full_log_prob += float(log_probs[:, 0].sum())
            counts.log_prob_error += float(np.abs(first.log_probs[:, 0] - log_probs[:, 1]).sum())
            for counted in of_modes:
                counted.add(hidden, labels, best)
        if label_log_probs.known:
            of_first = first if experts_searched == 1 else engine.topk(hidden, 1)
            counts.log_prob += float(label_log_probs.of(hidden, labels[:, 0], of_first).sum())
        for k in RECALL_AT:
            if best is not None:
                counts.full_hits[k] += int((best[:, :k] == labels).sum())
            if k > engine.n_reachable:
                continue
            # One call for each k: a longer answer may search more experts, and rank otherwise.
            answer = first if k == 1 else engine.topk(hidden, k, experts_searched)
            counts.scored[k] += bundle.cost_of(answer.expert_rows, k)
            counts.hits[k] += int((answer.classes == labels).sum())
            if best is not None:
                same = answer.classes[:, :, None] == best[:, None, :k]  # [B,k,k]
                counts.shared[k] += int(same.sum())
    return counts


def _contains(ascending: NDArray[np.int64], asked: NDArray[np.int64]) -> NDArray[np.bool_]:
    place = np.searchsorted(ascending, asked)
    found: NDArray[np.bool_] = ascending[np.minimum(place, len(ascending) - 1)] == asked
    return found


def _gate_session(bundle: Bundle) -> onnxruntime.InferenceSession:
    """The bundle's own gate: the engine returns only its first choice."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        bundle.gate_model, options, providers=["CPUExecutionProvider"]
    )


def _latencies(
    engine: Engine,
    vectors: Vectors,
    head: Head | None,
    k: int,
    experts_searched: int,
    modes: Sequence[Mode],
) -> tuple[list[float], float | None]:
    """Median microseconds of one row's top-k by the engine, by it in each mode, and by a full scan,
    one thread each.

    Rows from all over the data take turns, so that experts come and go as in real traffic. How
    long a full scan takes does not depend on its weights, so random ones stand in for the head.
    """
    rows = len(vectors.labels)
    chosen = np.unique(np.linspace(0, rows - 1, min(rows, TIMED_ROWS)).astype(np.int64))
    single = [np.asarray(vectors.hidden[row : row + 1], np.float32) for row in chosen]  # [1,D] each
    if head is None:
        shape = (engine.n_classes, engine.hidden_size)
        head = Head(np.random.default_rng(0).standard_normal(shape, np.float32), None)
    scan = full_scan(head, k)
    calls = [partial(_next_topk, engine, cycle(single), k, experts_searched, SPARSE)]
    calls += [partial(_next_topk, engine, cycle(single), k, 1, mode) for mode in modes]
    if scan is None:
        return [round(latency, 1) for latency in timed(*calls)], None
    queries = cycle(single)
    *latencies, full = (round(found, 1) for found in timed(*calls, lambda: scan(next(queries))))
    return latencies, full


def _next_topk(
    engine: Engine,
    queries: Iterator[NDArray[np.float32]],
    k: int,
    experts: int,
    mode: Mode,
) -> object:
    return engine.topk(next(queries), k, experts, mode)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    try:
        write_json(path, content)
    except OSError as error:
        raise OutputImpossible(f"{path} cannot be written.") from error


# --- for people ------------------------------------------------------------------------------


def table(figures: dict[str, Any]) -> str:
    lines = [
        figures["bundle"],
        "",
        f"{'':<17} " + " ".join(f"{f'top {k}':>9}" for k in RECALL_AT),
        *(
            f"{name:<17} " + " ".join(f"{cell:>9}" for cell in cells(values, style))
            for name, values, style in rows_by_k(figures)
        ),
        "",
        *(f"{name:<17} {value}" for name, value in summary(figures)),
    ]
    return "\n".join(lines)


def rows_by_k(figures: dict[str, Any]) -> list[tuple[str, PerK | None, str]]:
    return [
        ("accuracy", figures["accuracy"], ".4f"),
        ("full softmax", figures["full_accuracy"], ".4f"),
        ("precision", figures["precision"], ".4f"),
        *((f"  {found['asked']}", found["precision"], ".4f") for found in figures["modes"]),
        ("classes scored", figures["mean_rows_at"], ",.1f"),
    ]


def cells(values: PerK | None, style: str) -> list[str]:
    found = [None] * len(RECALL_AT) if values is None else list(values.values())
    return ["-" if value is None else format(value, style) for value in found]


def summary(figures: dict[str, Any]) -> list[tuple[str, str]]:
    full, latency = figures["full_latency_us"], figures["latency_us"]
    against = "" if full is None else f", a full scan {full:,.1f} us ({full / latency:.2f}x)"
    searched = f"{figures['experts_searched']} of {figures['n_experts']} experts searched"
    return [
        ("rows", f"{figures['rows']:,}, {searched}"),
        ("perplexity", _words_on_perplexity(figures)),
        *(
            [("log prob error", f"{figures['log_prob_error']:.4f}, the first answer's, mean")]
            if figures["log_prob_error"] is not None
            else []
        ),
        ("reachable recall", f"{figures['reachable_recall']:.4f}"),
        ("mean rows", f"{figures['mean_rows']:,.1f} of {figures['n_classes']:,} classes"),
        ("FLOPs speedup", f"{figures['flops_speedup']:.2f}x"),
        ("latency", f"{latency:,.1f} us{against}, one row, top {figures['latency_k']}"),
        *((found["asked"], words(found, figures["latency_k"])) for found in figures["modes"]),
    ]


def _words_on_perplexity(figures: dict[str, Any]) -> str:
    own, full = (
        "-" if value is None else f"{value:,.2f}"
        for value in (figures["perplexity"], figures["full_perplexity"])
    )
    return f"{own}, of the full softmax {full}"
