"""Training on somebody's hidden vectors, labels and trained head.

M rows, D hidden, N classes, b rows asked for, T rows tested on.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from service.bundle import flops_speedup
from service.errors import DSSError
from service.terminal import progress
from trainer.data import run_folder
from trainer.data.arrays import Head, Vectors, chunks
from trainer.data.files import write_json
from trainer.layer import DSSoftmax
from trainer.training import metrics, mitosis
from trainer.training.config import VectorsConfig, to_dict
from trainer.training.full_softmax import fitted_head
from trainer.training.methods import METHODS, Learned, Problem

EVALUATED_ROWS = 20_000
PARITY_ROWS = 1_000
NORMALISERS = "normalisers.npy"
SCORED_AT_ONCE = 128  # rows whose logits over all classes stay in the cache
HEAD = "head.npy"  # learned here, where none was given


class TwoBudgets(DSSError):
    pass


class ExpertsNotDoubling(DSSError):
    pass


class MappedRows:
    """Hidden vectors on disk; only the rows asked for are read, as float32.

    For a head with a bias each vector gets a constant 1 at its end: the bias is one more weight.
    """

    def __init__(
        self,
        array: NDArray[np.floating[Any]],
        *,
        chosen: Tensor | None = None,  # numbers of the rows that count; None: all
        biased: bool = False,
    ) -> None:
        self._array = array
        self._chosen = chosen
        self._biased = biased

    def __getitem__(self, rows: Tensor, /) -> Tensor:
        numbers = rows if self._chosen is None else self._chosen[rows]
        found = torch.from_numpy(self._array[numbers.numpy()].astype(np.float32))  # [b,D]
        return nn.functional.pad(found, (0, 1), value=1.0) if self._biased else found


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

    `normalisers` is where runs on the same vectors share what the full softmax makes of them.
    """
    check_experts(config)
    n_classes = count_classes(training, valid) if head is None else len(head.weight)
    budget = mean_rows_allowed(config, n_classes)
    settings = {"task": "vectors", **files, **to_dict(config)}
    run_folder.check_run(folder, settings, resume=resume)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    biased = head is not None and head.bias is not None
    chosen = chosen_rows(config, len(training.labels))
    inputs = MappedRows(training.hidden, chosen=chosen, biased=biased)
    labels = torch.from_numpy(training.labels.astype(np.int64))  # [M]
    labels = of_chosen(labels, chosen)
    if head is None:
        run_folder.open_run(folder, settings, resume=resume)
        weight = fitted_head(config, inputs, labels, n_classes, folder / HEAD)  # [N,D]
    else:
        weight = with_bias(head)
    sampled = sample(len(labels), config.sample_rows, config.seed)
    tested = held_out(training, valid, config.seed, biased=biased)

    def find_normalisers() -> Tensor:
        if normalisers is None:
            return full_normalisers(inputs, len(labels), weight, folder / NORMALISERS)
        everything = MappedRows(training.hidden, biased=biased)
        found = full_normalisers(everything, len(training.labels), weight, normalisers)
        return of_chosen(found, chosen)

    problem = Problem(
        inputs,
        labels,
        weight,
        sampled=sampled,
        hidden=inputs[sampled],
        budget=budget,
        folder=folder,
        resume=resume,
        begin=lambda: run_folder.open_run(folder, settings, resume=resume or head is None),
        normalisers=find_normalisers,
        tested=tested.figures,
    )
    learned = METHODS[config.method](config, problem)
    if learned.memory:
        write_growth(folder / run_folder.GROWTH, learned)
    run_folder.save_layer(folder, learned.layer, tested.plain[:PARITY_ROWS], biased=biased)
    summary = summarize(config, learned, tested, weight) | {"rows_asked": budget}
    write_json(folder / run_folder.SUMMARY, summary)
    return summary


@dataclass(frozen=True)
class HeldOut:
    """Rows that a layer is judged by."""

    hidden: Tensor  # [T,D] as the layer takes them
    labels: Tensor  # [T]
    plain: NDArray[np.float32]  # [T,D] as the user has them
    name: str

    def figures(self, layer: DSSoftmax) -> dict[str, Any]:
        utilization = metrics.utilization(layer, self.hidden)
        sizes = layer.expert_sizes
        return {
            "accuracy": metrics.accuracy_at(layer, self.hidden, self.labels),
            "mean_rows": float(utilization @ torch.tensor(sizes).double()),
            "flops_speedup": flops_speedup(layer.n_classes, sizes, utilization.tolist()),
        }


def held_out(training: Vectors, valid: Vectors | None, seed: int, *, biased: bool) -> HeldOut:
    tested = training if valid is None else valid
    rows = sample(len(tested.labels), EVALUATED_ROWS, seed + 1)
    return HeldOut(
        MappedRows(tested.hidden, biased=biased)[rows],
        torch.from_numpy(tested.labels[rows.numpy()].astype(np.int64)),
        MappedRows(tested.hidden)[rows].numpy(),
        "training vectors" if valid is None else "validation vectors",
    )


def summarize(
    config: VectorsConfig, learned: Learned, tested: HeldOut, head: Tensor
) -> dict[str, Any]:
    layer = learned.layer.eval()
    full = metrics.full_accuracy_at(head, tested.hidden, tested.labels)
    found = tested.figures(layer)
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
        "utilization": metrics.utilization(layer, tested.hidden).tolist(),
        "seed": config.seed,
        "seconds": round(learned.seconds, 1),
        "on": tested.name,
    }
    if learned.memory:
        summary["peak_memory"] = learned.peak_memory
    return summary


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


def of_chosen(values: Tensor, chosen: Tensor | None) -> Tensor:
    return values if chosen is None else values[chosen]


def count_classes(training: Vectors, valid: Vectors | None) -> int:
    """N, where only labels tell it."""
    return 1 + max(int(found.labels.max()) for found in (training, valid) if found is not None)


def with_bias(head: Head) -> Tensor:
    weight = torch.from_numpy(head.weight)
    if head.bias is None:
        return weight
    return torch.cat([weight, torch.from_numpy(head.bias)[:, None]], dim=1)


def check_experts(config: VectorsConfig) -> None:
    if config.method == "mitosis" and config.n_experts not in mitosis.stages(config.n_experts):
        raise ExpertsNotDoubling(
            f"Mitosis doubles the experts from 2 on, so it cannot end with {config.n_experts}."
        )


@torch.no_grad()
def full_normalisers(rows: MappedRows, n_rows: int, head: Tensor, file: Path) -> Tensor:
    """The full softmax's log-normaliser for every row, [M]; computed once and kept in the run.

    With it a row's teacher is scored on the classes of one expert only, so epochs are cheap.
    """
    if file.exists():
        kept = np.load(file, allow_pickle=False)
        if len(kept) == n_rows:
            return torch.from_numpy(kept)
    # Both are made once: small results between large products would leave holes in memory.
    logits = torch.empty(SCORED_AT_ONCE, len(head))  # [b,N]
    found = torch.empty(n_rows)  # [M]
    for part in progress.each(list(chunks(n_rows, SCORED_AT_ONCE)), "full softmax"):
        hidden = rows[torch.arange(part.start, part.stop)]  # [b,D]
        scored = torch.mm(hidden, head.T, out=logits[: len(hidden)])
        found[part] = scored.logsumexp(dim=1)
    temporary = file.with_name(f"partial-{file.name}")
    np.save(temporary, found.numpy())
    temporary.replace(file)
    return found


def mean_rows_allowed(config: VectorsConfig, n_classes: int) -> float:
    if config.rows is not None and config.speedup is not None:
        raise TwoBudgets("Give a budget as rows or as a speedup, not both.")
    if config.speedup is not None:
        return n_classes / config.speedup - config.n_experts
    return float(n_classes) if config.rows is None else config.rows


def sample(n_rows: int, wanted: int, seed: int) -> Tensor:
    """Some rows in random order, the same for the same seed."""
    return torch.randperm(n_rows, generator=torch.Generator().manual_seed(seed))[:wanted]
