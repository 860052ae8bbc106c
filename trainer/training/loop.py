"""The training loop: Algorithm 1 of the paper, resumable at any step.

B query rows of a batch, M query rows, D hidden, K experts, N classes, R weight rows.
"""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from service.bundle import flops_speedup
from service.errors import DSSError
from service.terminal import progress as bars
from trainer.data import run_folder
from trainer.data.files import write_whole
from trainer.data.rows import Rows
from trainer.layer import DSSoftmax, Routing, Teacher, losses
from trainer.layer.pruning import keep_one_copy, prune, rows_above, shrink
from trainer.training.best_epoch import BestEpoch
from trainer.training.checkpoints import Progress, Traffic, load_checkpoint, save_checkpoint
from trainer.training.config import TrainConfig
from trainer.training.idle_experts import rescue
from trainer.training.optimizer import make_optimizer, set_learning_rate

SMOOTHING = 0.9


class Interrupted(DSSError):
    """The user stopped the run; its checkpoint is complete."""


@dataclass(frozen=True)
class Data:
    inputs: Rows  # [M, ...]
    labels: Tensor  # [M]
    head: Tensor | None = None  # [N,D] a full softmax to learn from ...
    logsumexp: Tensor | None = None  # [M] ... and its normaliser for every query row


def train(
    config: TrainConfig,
    encoder: nn.Module,
    layer: DSSoftmax,
    data: Data,
    folder: Path,
    *,
    budget: float | None = None,
    best: BestEpoch | None = None,
    resume: bool = False,
) -> Progress:
    """Train encoder and layer together; both are changed in place.

    With a budget, the lassos grow until the mean number of classes scored per query row is in it.
    `best` keeps the best epoch's layer, and may end the training early.
    """
    if resume and (folder / run_folder.CHECKPOINT).exists():
        progress, traffic, optimizer = load_checkpoint(folder, config, encoder, layer)
    else:
        progress, optimizer = Progress(), make_optimizer(config, encoder, layer)
        no_load = torch.zeros(layer.n_experts)
        traffic = Traffic(torch.zeros(len(layer.keys)), no_load, no_load.clone())
    encoder.train()
    layer.train()
    before, started = progress.seconds, time.monotonic()
    saved = started

    def save() -> None:
        nonlocal saved
        progress.seconds = before + time.monotonic() - started
        save_checkpoint(folder, progress, traffic, encoder, layer, optimizer)
        saved = time.monotonic()

    n_batches = math.ceil(len(data.labels) / config.batch_size)
    finished = progress.epoch * n_batches + progress.step
    drawn = bars.bar("epochs", config.epochs * n_batches, done=finished)
    with stop_requests() as stopped, MetricsLog(folder, progress.epoch) as log, drawn as bar:
        while progress.epoch < config.epochs and not (best and best.passed(progress.epoch)):
            batches = epoch_batches(
                len(data.labels), config.batch_size, config.seed, progress.epoch
            )
            bar.describe(f"epoch {progress.epoch + 1}/{config.epochs}")
            for rows in batches[progress.step :]:
                set_learning_rate(config, optimizer, progress.epoch + progress.step / n_batches)
                layer.gate_noise = gate_noise(config, progress.epoch + progress.step / n_batches)
                progress.terms, hidden, expert = training_step(
                    config, encoder, layer, optimizer, data, rows, lasso_pressure(progress)
                )
                traffic.count(layer, expert, data.labels[rows])
                progress.step += 1
                progress.task_loss = smoothed(progress.task_loss, progress.terms["task"])
                if not progress.sparsifying and due(progress.step, config.rescue_every):
                    needed = rescue(layer, optimizer, traffic.recent_load, hidden, expert)
                    progress.settled = not needed
                    traffic.recent_load.zero_()
                if not progress.sparsifying:
                    epoch = progress.epoch + progress.step / n_batches
                    progress.sparsifying = may_sparsify(config, progress, epoch)
                    progress.over_budget = over_budget(layer, traffic, budget)
                elif due(progress.step, config.prune_every):
                    prune_small_rows(config, layer, optimizer, traffic, progress)
                    watch_budget(config, layer, traffic, progress, budget)
                bar.advance(**live_figures(layer, traffic.epoch_load, progress.terms))
                if stopped():
                    save()
                    raise Interrupted(f"Stopped; everything so far is in {folder}: resume it.")
                if time.monotonic() - saved > config.checkpoint_seconds:
                    save()
            progress.epoch, progress.step = progress.epoch + 1, 0
            now = figures(layer, traffic.epoch_load)
            log.write({"epoch": progress.epoch, **progress.terms, **now})
            traffic.epoch_load.zero_()
            if best is not None:
                best.measure(layer, progress.epoch)
        if progress.sparsifying:
            prune_small_rows(config, layer, optimizer, traffic, progress)
        save()
    return progress


def training_step(
    config: TrainConfig,
    encoder: nn.Module,
    layer: DSSoftmax,
    optimizer: torch.optim.Optimizer,
    data: Data,
    rows: Tensor,
    pressure: float,
) -> tuple[dict[str, float], Tensor, Tensor]:
    """One update of U, W and the encoder.

    Returns the terms of the objective, unweighted, the hidden vectors [B,D] and the experts [B].
    """
    hidden = encoder(data.inputs[rows])  # [B,D]
    routing = layer.route(hidden)
    terms = {
        "task": task_loss(config, layer, data, rows, hidden, routing),
        "load": losses.load_balance(routing.gate, routing.expert, layer.n_experts),
    }
    objective = terms["task"] + config.lambda_load * terms["load"]
    if pressure:
        squares = layer.row_squares()  # [R]
        terms["lasso"] = losses.class_lasso(squares)
        terms["expert"] = expert_lasso(config, layer, squares)
        objective = objective + pressure * config.lambda_expert * terms["expert"]
        if not config.proximal:
            objective = objective + pressure * config.lambda_lasso * terms["lasso"]
    optimizer.zero_grad()
    objective.backward()
    optimizer.step()
    if pressure and config.proximal:
        (group,) = optimizer.param_groups
        shrink(layer, optimizer, group["lr"] * pressure * config.lambda_lasso)
    return {name: term.item() for name, term in terms.items()}, hidden.detach(), routing.expert


def task_loss(
    config: TrainConfig,
    layer: DSSoftmax,
    data: Data,
    rows: Tensor,
    hidden: Tensor,
    routing: Routing,
) -> Tensor:
    """L_task against the labels, mixed with the full softmax's answers if there is one."""
    labels = data.labels[rows]  # [B]
    if data.head is None or data.logsumexp is None:
        return losses.task(layer(hidden, labels, routing).output)
    teacher = Teacher(data.head, data.logsumexp[rows], config.distil)
    return layer.distillation_loss(hidden, labels, teacher, routing).mean()


def expert_lasso(config: TrainConfig, layer: DSSoftmax, squares: Tensor) -> Tensor:
    if config.expert_lasso == "printed":
        return losses.expert_lasso_printed(squares, layer.expert_of_row, layer.n_experts)
    return losses.expert_lasso_coded(squares, layer.class_of_row, layer.n_classes)


def may_sparsify(config: TrainConfig, progress: Progress, epoch: float) -> bool:
    reached = config.sparsify_from_epoch is not None and epoch >= config.sparsify_from_epoch
    settled = progress.settled or not config.rescue_every
    return reached or (settled and progress.task_loss < config.sparsify_below)


def due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def lasso_pressure(progress: Progress) -> float:
    return progress.pressure if progress.sparsifying and progress.over_budget else 0.0


def watch_budget(
    config: TrainConfig,
    layer: DSSoftmax,
    traffic: Traffic,
    progress: Progress,
    budget: float | None,
) -> None:
    """Dual ascent on the cost: raise the lassos while over the budget, stop them within it."""
    if budget is None:
        return
    progress.over_budget = over_budget(layer, traffic, budget)
    if progress.over_budget:
        progress.pressure *= config.pressure_growth
    traffic.recent_load /= 2


def over_budget(layer: DSSoftmax, traffic: Traffic, budget: float | None) -> bool:
    """Whether more classes are scored per query row than the budget; always, if there is none."""
    if budget is None:
        return True
    utilization = traffic.recent_load / traffic.recent_load.sum().clamp_min(1)
    return float(utilization @ torch.tensor(layer.expert_sizes, dtype=utilization.dtype)) > budget


def prune_small_rows(
    config: TrainConfig,
    layer: DSSoftmax,
    optimizer: torch.optim.Optimizer,
    traffic: Traffic,
    progress: Progress,
) -> None:
    if progress.over_budget:
        drop_small_rows(config, layer, optimizer, traffic)
    progress.rows.append(len(layer.keys))


def drop_small_rows(
    config: TrainConfig, layer: DSSoftmax, optimizer: torch.optim.Optimizer, traffic: Traffic
) -> None:
    kept = rows_above(layer, config.prune_threshold)
    if config.keep_one:
        kept = keep_one_copy(layer, kept, traffic.contexts)
    if not kept.all():
        prune(layer, optimizer, kept)
    traffic.contexts = traffic.contexts[kept] / 2  # older counts weigh less and less


def gate_noise(config: TrainConfig, epoch: float) -> float:
    """Noise sends query rows to other experts early on; it has ended when experts specialise."""
    if not config.gate_noise_epochs:
        return 0.0
    return config.gate_noise * max(0.0, 1 - epoch / config.gate_noise_epochs)


def epoch_batches(n_rows: int, batch_size: int, seed: int, epoch: int) -> list[Tensor]:
    """The rows of each batch: a function of seed and epoch alone, so that a run can be resumed."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return list(torch.randperm(n_rows, generator=generator).split(batch_size))


def smoothed(average: float, value: float) -> float:
    return value if math.isinf(average) else SMOOTHING * average + (1 - SMOOTHING) * value


# --- what a user sees while it runs -----------------------------------------------------------


def figures(layer: DSSoftmax, load: Tensor) -> dict[str, Any]:
    sizes = layer.expert_sizes
    utilization = (load / load.sum()).tolist()
    return {
        "rows": sum(sizes),
        "flops_speedup": flops_speedup(layer.n_classes, sizes, utilization),
        "expert_sizes": sizes,
        "experts_used": int((load > 0).sum()),
    }


def live_figures(layer: DSSoftmax, load: Tensor, terms: dict[str, float]) -> dict[str, str]:
    now = figures(layer, load)
    sizes = now["expert_sizes"]
    shown = {name: f"{value:.3g}" for name, value in terms.items()}
    shown["speedup"] = f"{now['flops_speedup']:.1f}x"
    shown["sizes"] = f"{min(sizes)}-{max(sizes)}"
    return shown


class MetricsLog:
    """metrics.jsonl: one line an epoch. A resumed run drops the lines it will write again."""

    def __init__(self, folder: Path, epochs_done: int) -> None:
        self._path = folder / run_folder.METRICS
        self._epochs_done = epochs_done

    def __enter__(self) -> "MetricsLog":
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        kept = [line for line in lines if json.loads(line)["epoch"] <= self._epochs_done]
        write_whole(self._path, "".join(f"{line}\n" for line in kept).encode())
        self._file = self._path.open("a")
        return self

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def __exit__(self, *_: object) -> None:
        self._file.close()


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks for a stop after the current step; a second one stops at once."""
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
