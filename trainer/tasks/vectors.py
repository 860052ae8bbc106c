"""Training on somebody's hidden vectors, labels and trained head.

The layer starts warm and learns gate and rows together from labels and the full softmax's answers.
Then the classes are chosen anew for where rows go now, and the rows learn once more with the gate
held fixed, so that the budget holds.

M rows, D hidden, K experts, N classes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor, nn
from tqdm import tqdm

from service.bundle import flops_speedup
from service.errors import DSSError
from trainer import evaluate, runs, warm
from trainer.config import TrainConfig, to_dict
from trainer.files import write_json
from trainer.layer import DSSoftmax
from trainer.train import Data, train
from trainer.vectors import Head, Vectors

ROUNDS = 2
EVALUATED_ROWS = 20_000
PARITY_ROWS = 1_000
NORMALISERS = "normalisers.npy"


class BiasUnsupported(DSSError):
    pass


class TwoBudgets(DSSError):
    pass


@pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class VectorsConfig(TrainConfig):
    n_experts: int = Field(64, ge=1)
    gate_noise: float = Field(0.0, ge=0)
    epochs: int = Field(3, ge=1)  # of each of the two rounds
    batch_size: int = Field(2000, ge=1)
    learning_rate: float = Field(0.001, gt=0)
    learning_rate_end: float = Field(0.02, ge=0, le=1)
    beta2: float = Field(0.999, gt=0, lt=1)
    lambda_load: float = Field(0.0, ge=0)
    sparsify_below: float = Field(0.0, ge=0)  # classes are chosen by the budget
    distil: float = Field(0.5, ge=0, le=1)
    rows: float | None = Field(None, gt=0)  # budget: classes scored per answer, on average
    speedup: float | None = Field(None, gt=0)  # budget: N / (rows + K)
    sample_rows: int = Field(200_000, ge=1)  # for clusters and for choosing classes


class MappedRows:
    """Hidden vectors on disk; only the rows asked for are read, as float32."""

    def __init__(self, array: NDArray[np.floating[Any]]) -> None:
        self._array = array

    def __getitem__(self, rows: Tensor, /) -> Tensor:
        return torch.from_numpy(self._array[rows.numpy()].astype(np.float32))


def run(
    config: VectorsConfig,
    files: dict[str, str],
    training: Vectors,
    valid: Vectors | None,
    head: Head,
    folder: Path,
    *,
    resume: bool = False,
) -> dict[str, Any]:
    """Train and evaluate; returns what summary.json holds. `files` names the inputs for the run."""
    if head.bias is not None:
        raise BiasUnsupported("A head with a bias cannot be learned from.")
    budget = mean_rows_allowed(config, len(head.weight))
    settings = {"task": "vectors", **files, **to_dict(config)}
    runs.check_run(folder, settings, resume=resume)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    weight = torch.from_numpy(head.weight)  # [N,D]
    labels = torch.from_numpy(training.labels.astype(np.int64))  # [M]
    inputs = MappedRows(training.hidden)
    sampled = sample(len(labels), config.sample_rows, config.seed)
    hidden = inputs[sampled]  # [S,D]

    gate, layer, seconds = warm.cluster_gate(hidden, config.n_experts, config.seed), None, 0.0
    for number in range(1, ROUNDS + 1):
        wanted = warm.demand(gate, hidden, labels[sampled], weight)
        held = warm.select(wanted, budget, keep_one=config.keep_one)
        layer = warm.make_layer(gate, held, weight, before=layer)
        layer.gate.requires_grad_(number < ROUNDS)
        if number == 1:  # the budget is possible: only now is anything written
            runs.open_run(folder, settings, resume=resume)
            normalisers = full_normalisers(inputs, len(labels), weight, folder / NORMALISERS)
            data = Data(inputs, labels, head=weight, logsumexp=normalisers)
        subfolder = folder / f"round-{number}"
        subfolder.mkdir(exist_ok=True)
        torch.manual_seed(config.seed + number)
        seconds += train(config, nn.Identity(), layer, data, subfolder, resume=resume).seconds
        gate = layer.gate.detach()

    tested = training if valid is None else valid
    rows = sample(len(tested.labels), EVALUATED_ROWS, config.seed + 1)
    summary = figures(layer.eval(), tested, rows, weight)
    summary |= {
        "seed": config.seed,
        "seconds": round(seconds, 1),
        "on": "training vectors" if valid is None else "validation vectors",
    }
    runs.save_layer(folder, layer, MappedRows(tested.hidden)[rows[:PARITY_ROWS]].numpy())
    write_json(folder / runs.SUMMARY, summary)
    return summary


@torch.no_grad()
def full_normalisers(rows: MappedRows, n_rows: int, head: Tensor, file: Path) -> Tensor:
    """The full softmax's log-normaliser for every row, [M]; computed once and kept in the run.

    With it a row's teacher is scored on the classes of one expert only, so epochs are cheap.
    """
    if not file.exists():
        parts = tqdm(list(evaluate.chunks(n_rows)), desc="full softmax", disable=None)
        found = [
            (rows[torch.arange(part.start, min(part.stop, n_rows))] @ head.T).logsumexp(dim=1)
            for part in parts
        ]
        temporary = file.with_name(f"partial-{file.name}")
        np.save(temporary, torch.cat(found).numpy())
        temporary.replace(file)
    return torch.from_numpy(np.load(file, allow_pickle=False))


def mean_rows_allowed(config: VectorsConfig, n_classes: int) -> float:
    if config.rows is not None and config.speedup is not None:
        raise TwoBudgets("Give a budget as rows or as a speedup, not both.")
    if config.speedup is not None:
        return n_classes / config.speedup - config.n_experts
    return float(n_classes) if config.rows is None else config.rows


def sample(n_rows: int, wanted: int, seed: int) -> Tensor:
    """Some rows in random order, the same for the same seed."""
    return torch.randperm(n_rows, generator=torch.Generator().manual_seed(seed))[:wanted]


def figures(layer: DSSoftmax, tested: Vectors, rows: Tensor, head: Tensor) -> dict[str, Any]:
    hidden = MappedRows(tested.hidden)[rows]
    labels = torch.from_numpy(tested.labels[rows.numpy()].astype(np.int64))
    full = sum(
        int(((hidden[part] @ head.T).argmax(1) == labels[part]).sum())
        for part in evaluate.chunks(len(hidden))
    )
    utilization = evaluate.utilization(layer, hidden)
    sizes = layer.expert_sizes
    return {
        "task": "vectors",
        "accuracy": evaluate.accuracy(layer, hidden, labels),
        "full_accuracy": full / len(hidden),
        "mean_copies": evaluate.copies(layer).double().mean().item(),
        "mean_rows": float(utilization @ torch.tensor(sizes).double()),
        "flops_speedup": flops_speedup(layer.n_classes, sizes, utilization.tolist()),
        "utilization": utilization.tolist(),
    }
