"""Training on hidden vectors, labels and a trained head of the user.

M query rows, D hidden, N classes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from service.errors import DSSError
from trainer.data import run_folder
from trainer.data.arrays import Head, Vectors
from trainer.data.files import write_json
from trainer.data.rows import MappedRows, sample
from trainer.training import metrics, mitosis
from trainer.training.config import VectorsConfig, to_dict
from trainer.training.full_softmax import fitted_head, full_normalisers
from trainer.training.loop import Data
from trainer.training.methods import METHODS
from trainer.training.problem import HeldOut, Learned, Problem

EVALUATED_ROWS = 20_000
PARITY_ROWS = 1_000
NORMALISERS = "normalisers.npy"
HEAD = "head.npy"  # learned here, where none was given


class TwoBudgets(DSSError):
    pass


class ExpertsNotDoubling(DSSError):
    pass


def run(
    config: VectorsConfig,
    files: dict[str, str],
    training: Vectors,
    valid: Vectors | None,
    head: Head | None,
    folder: Path,
    *,
    resume: bool = False,
    normalisers: Path | None = None,
) -> dict[str, Any]:
    """Train and evaluate; returns what summary.json holds. `files` names the inputs for the run.

    `normalisers` is a file that runs on the same vectors share; see `full_normalisers`.
    """
    check_experts(config)
    n_classes = count_classes(training, valid) if head is None else len(head.weight)
    budget = mean_rows_allowed(config, n_classes)
    settings = {"task": "vectors", **files, **to_dict(config)}
    run_folder.check_run(folder, settings, resume=resume)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    chosen = chosen_rows(config, len(training.labels))
    inputs = MappedRows(training.hidden, chosen=chosen)
    labels = of_chosen(torch.from_numpy(training.labels.astype(np.int64)), chosen)  # [M]
    if head is None:
        run_folder.open_run(folder, settings, resume=resume)
        weight = fitted_head(config, inputs, labels, n_classes, folder / HEAD)  # [N,D]
    else:
        weight = with_bias(head)
    sampled = sample(len(labels), config.sample_rows, config.seed)
    problem = Problem(
        inputs,
        labels,
        weight,
        sampled=sampled,
        hidden=inputs[sampled],
        budget=budget,
        held_out=held_out(training, valid, config.seed),
    )

    method = METHODS[config.method]
    layer = method.start(config, problem)  # an impossible budget ends here: no folder is made
    run_folder.open_run(folder, settings, resume=resume or head is None)
    data = Data(inputs, labels)
    if config.distil:
        logsumexp = chosen_normalisers(training, chosen, weight, folder, normalisers)
        data = Data(inputs, labels, head=weight, logsumexp=logsumexp)
    learned = method.learn(config, problem, layer, data, folder, resume=resume)

    if learned.memory:
        write_growth(folder / run_folder.GROWTH, learned)
    checked = problem.held_out.hidden[:PARITY_ROWS].numpy()
    run_folder.save_layer(folder, learned.layer, checked)
    summary = summarize(config, problem, learned)
    write_json(folder / run_folder.SUMMARY, summary)
    return summary


def held_out(training: Vectors, valid: Vectors | None, seed: int) -> HeldOut:
    vectors = training if valid is None else valid
    rows = sample(len(vectors.labels), EVALUATED_ROWS, seed + 1)
    return HeldOut(
        MappedRows(vectors.hidden)[rows],
        torch.from_numpy(vectors.labels[rows.numpy()].astype(np.int64)),
        "training vectors" if valid is None else "validation vectors",
    )


def summarize(config: VectorsConfig, problem: Problem, learned: Learned) -> dict[str, Any]:
    layer, held_out = learned.layer.eval(), problem.held_out
    full = metrics.full_accuracy_at(problem.head, held_out.hidden, held_out.labels)
    found = held_out.figures(layer)
    summary = {
        "task": "vectors",
        "method": config.method,
        "keep_one": config.keep_one,
        **found,
        "accuracy": found["accuracy"]["1"],
        "accuracy_at": found["accuracy"],
        "full_accuracy": full["1"],
        "full_accuracy_at": full,
        "mean_copies": metrics.copies(layer).double().mean().item(),
        "utilization": metrics.utilization(layer, held_out.hidden).tolist(),
        "seed": config.seed,
        "seconds": round(learned.seconds, 1),
        "on": held_out.name,
    }
    if learned.memory:
        summary["peak_memory"] = learned.peak_memory
    return summary | {"rows_asked": problem.budget}


def write_growth(file: Path, learned: Learned) -> None:
    memory = [{"step": step, **now} for step, now in enumerate(learned.memory)]
    write_json(
        file,
        {"peak_memory": learned.peak_memory, "stages": learned.stages, "memory": memory},
    )


def chosen_rows(config: VectorsConfig, n_rows: int) -> Tensor | None:
    if config.train_rows is None or config.train_rows >= n_rows:
        return None
    return sample(n_rows, config.train_rows, config.seed + 2).sort().values


def chosen_normalisers(
    training: Vectors, chosen: Tensor | None, weight: Tensor, folder: Path, shared: Path | None
) -> Tensor:
    """Of the chosen rows, kept in the run; of all rows in a file that other runs share."""
    if shared is None:
        rows = MappedRows(training.hidden, chosen=chosen)
        n_rows = len(training.labels) if chosen is None else len(chosen)
        return full_normalisers(rows, n_rows, weight, folder / NORMALISERS)
    everything = MappedRows(training.hidden)
    found = full_normalisers(everything, len(training.labels), weight, shared)
    return of_chosen(found, chosen)


def of_chosen(values: Tensor, chosen: Tensor | None) -> Tensor:
    return values if chosen is None else values[chosen]


def count_classes(training: Vectors, valid: Vectors | None) -> int:
    """N, where only labels tell it."""
    return 1 + max(int(found.labels.max()) for found in (training, valid) if found is not None)


def with_bias(head: Head) -> Tensor:
    """The full softmax [N,D], or [N,D+1] with its biases in the last column."""
    weight = torch.from_numpy(head.weight)
    if head.bias is None:
        return weight
    return torch.cat([weight, torch.from_numpy(head.bias)[:, None]], dim=1)


def check_experts(config: VectorsConfig) -> None:
    if config.method == "mitosis" and config.n_experts not in mitosis.stages(config.n_experts):
        raise ExpertsNotDoubling(
            f"Mitosis doubles the experts from 2 on, so it cannot end with {config.n_experts}."
        )


def mean_rows_allowed(config: VectorsConfig, n_classes: int) -> float:
    if config.rows is not None and config.speedup is not None:
        raise TwoBudgets("Give a budget as rows or as a speedup, not both.")
    if config.speedup is not None:
        return n_classes / config.speedup - config.n_experts
    return float(n_classes) if config.rows is None else config.rows
