"""The training loop: Algorithm 1 of the paper, resumable at any step.

B rows, D hidden, K experts, N classes, R kept rows.
"""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from service.bundle import flops_speedup
from service.errors import DSSError
from service.terminal import progress as bars
from trainer.data import run_folder
from trainer.data.files import write_whole
from trainer.layer import DSSoftmax, Routing, Teacher, losses
from trainer.layer.pruning import keep_one_copy, prune, rows_above, shrink
from trainer.training.config import TrainConfig
from trainer.training.idle_experts import rescue

SMOOTHING = 0.9


class Interrupted(DSSError):
    """The user stopped the run; its checkpoint is complete."""


class Rows(Protocol):
    """A tensor, or something on disk that gives rows as one."""

    def __getitem__(self, rows: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Data:
    inputs: Rows  # [M, ...]
    labels: Tensor  # [M]
    head: Tensor | None = None  # [N,D] a full softmax to learn from ...
    logsumexp: Tensor | None = None  # [M] ... and its normaliser for every row


@dataclass
class Progress:
    """Where a run is; with the tensors and the random state, all that a checkpoint holds."""

    epoch: int = 0
    step: int = 0  # of this epoch
    task_loss: float = math.inf  # smoothed
    settled: bool = False  # no expert needed rescue when last looked at
    sparsifying: bool = False
    pressure: float = 1.0  # on both lassos; grows while the layer is over its budget
    over_budget: bool = True
    rows: list[int] = field(default_factory=list)  # held after each pruning
    seconds: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)  # of the objective, at the last step


@dataclass
class Traffic:
    """Where training rows went."""

    contexts: Tensor  # [R] recent rows of each (expert, class)
    epoch_load: Tensor  # [K] rows each expert received in this epoch
    recent_load: Tensor  # [K] ... and lately

    def count(self, layer: DSSoftmax, expert: Tensor, labels: Tensor) -> None:
        received = torch.bincount(expert, minlength=layer.n_experts)
        self.epoch_load += received
        self.recent_load += received
        row, held = layer.row_of(expert, labels)
        self.contexts += torch.bincount(row[held], minlength=len(self.contexts))


def train(
    config: TrainConfig,
    encoder: nn.Module,
    layer: DSSoftmax,
    data: Data,
    folder: Path,
    *,
    budget: float | None = None,
    resume: bool = False,
) -> Progress:
    """Train encoder and layer together; both are changed in place.

    With a budget, the lassos grow until the mean number of classes scored per row is within it.
    """
    if resume and (folder / run_folder.CHECKPOINT).exists():
        progress, tallies, optimizer = load_checkpoint(folder, config, encoder, layer)
    else:
        progress, optimizer = Progress(), make_optimizer(config, encoder, layer)
        no_load = torch.zeros(layer.n_experts)
        tallies = Traffic(torch.zeros(len(layer.keys)), no_load, no_load.clone())
    encoder.train()
    layer.train()
    before, started = progress.seconds, time.monotonic()
    saved = started

    def save() -> None:
        nonlocal saved
        progress.seconds = before + time.monotonic() - started
        save_checkpoint(folder, progress, tallies, encoder, layer, optimizer)
        saved = time.monotonic()

    n_batches = math.ceil(len(data.labels) / config.batch_size)
    finished = progress.epoch * n_batches + progress.step
    drawn = bars.bar("epochs", config.epochs * n_batches, done=finished)
    with stop_requests() as stopped, MetricsLog(folder, progress.epoch) as log, drawn as bar:
        while progress.epoch < config.epochs:
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
                tallies.count(layer, expert, data.labels[rows])
                progress.step += 1
                progress.task_loss = smoothed(progress.task_loss, progress.terms["task"])
                if not progress.sparsifying and due(progress.step, config.rescue_every):
                    needed = rescue(layer, optimizer, tallies.recent_load, hidden, expert)
                    progress.settled = not needed
                    tallies.recent_load.zero_()
                if not progress.sparsifying:
                    epoch = progress.epoch + progress.step / n_batches
                    progress.sparsifying = may_sparsify(config, progress, epoch)
                    progress.over_budget = over_budget(layer, tallies, budget)
                elif due(progress.step, config.prune_every):
                    prune_small_rows(config, layer, optimizer, tallies, progress)
                    watch_budget(config, layer, tallies, progress, budget)
                bar.advance(**live_figures(layer, tallies.epoch_load, progress.terms))
                if stopped():
                    save()
                    raise Interrupted(f"Stopped; everything so far is in {folder}: resume it.")
                if time.monotonic() - saved > config.checkpoint_seconds:
                    save()
            progress.epoch, progress.step = progress.epoch + 1, 0
            now = figures(layer, tallies.epoch_load)
            log.write({"epoch": progress.epoch, **progress.terms, **now})
            tallies.epoch_load.zero_()
        if progress.sparsifying:
            prune_small_rows(config, layer, optimizer, tallies, progress)
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


def set_learning_rate(config: TrainConfig, optimizer: torch.optim.Optimizer, epoch: float) -> None:
    """From the learning rate linearly down to its `learning_rate_end` share."""
    done = epoch / config.epochs
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * (1 - done * (1 - config.learning_rate_end))


def make_optimizer(config: TrainConfig, *modules: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    betas = (0.9, config.beta2)
    return torch.optim.Adam(parameters, lr=config.learning_rate, betas=betas, fused=True)


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
    tallies: Traffic,
    progress: Progress,
    budget: float | None,
) -> None:
    """Dual ascent on the cost: press harder while it is over the budget, let go when it is not."""
    if budget is None:
        return
    progress.over_budget = over_budget(layer, tallies, budget)
    if progress.over_budget:
        progress.pressure *= config.pressure_growth
    tallies.recent_load /= 2


def over_budget(layer: DSSoftmax, tallies: Traffic, budget: float | None) -> bool:
    """Are more classes scored per row than allowed? Without a budget fewer are always wanted."""
    if budget is None:
        return True
    utilization = tallies.recent_load / tallies.recent_load.sum().clamp_min(1)
    return float(utilization @ torch.tensor(layer.expert_sizes, dtype=utilization.dtype)) > budget


def prune_small_rows(
    config: TrainConfig,
    layer: DSSoftmax,
    optimizer: torch.optim.Optimizer,
    tallies: Traffic,
    progress: Progress,
) -> None:
    if progress.over_budget:
        drop_small_rows(config, layer, optimizer, tallies)
    progress.rows.append(len(layer.keys))


def drop_small_rows(
    config: TrainConfig, layer: DSSoftmax, optimizer: torch.optim.Optimizer, tallies: Traffic
) -> None:
    kept = rows_above(layer, config.prune_threshold)
    if config.keep_one:
        kept = keep_one_copy(layer, kept, tallies.contexts)
    if not kept.all():
        prune(layer, optimizer, kept)
    tallies.contexts = tallies.contexts[kept] / 2  # older contexts count less and less


def gate_noise(config: TrainConfig, epoch: float) -> float:
    """Noise lets rows try other experts early on; it is gone when the experts specialise."""
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


# --- checkpoints ------------------------------------------------------------------------------


def save_checkpoint(
    folder: Path,
    progress: Progress,
    tallies: Traffic,
    encoder: nn.Module,
    layer: DSSoftmax,
    optimizer: torch.optim.Optimizer,
) -> None:
    path = folder / run_folder.CHECKPOINT
    temporary = path.with_suffix(".tmp")
    torch.save(
        {
            "progress": asdict(progress),
            "tallies": vars(tallies),
            "encoder": encoder.state_dict(),
            "layer": layer.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random": torch.get_rng_state(),
        },
        temporary,
    )
    temporary.replace(path)


def load_checkpoint(
    folder: Path, config: TrainConfig, encoder: nn.Module, layer: DSSoftmax
) -> tuple[Progress, Traffic, torch.optim.Optimizer]:
    saved = torch.load(folder / run_folder.CHECKPOINT, weights_only=True)
    encoder.load_state_dict(saved["encoder"])
    layer.load_state_dict(saved["layer"])
    optimizer = make_optimizer(config, encoder, layer)
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    return Progress(**saved["progress"]), Traffic(**saved["tallies"]), optimizer
