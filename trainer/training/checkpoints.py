"""The state of a training run, and its checkpoint on disk.

K experts, R weight rows.
"""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.data import run_folder
from trainer.layer import DSSoftmax
from trainer.training.config import TrainConfig
from trainer.training.optimizer import make_optimizer


@dataclass
class Progress:
    """How far a run is. A checkpoint holds this, the tensors and the random state."""

    epoch: int = 0
    step: int = 0  # of this epoch
    task_loss: float = math.inf  # smoothed
    settled: bool = False  # no expert was idle at the last check
    sparsifying: bool = False
    pressure: float = 1.0  # on both lassos; grows while the layer is over its budget
    over_budget: bool = True
    rows: list[int] = field(default_factory=list)  # weight rows held after each pruning
    seconds: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)  # of the objective, at the last step


@dataclass
class Traffic:
    """Which experts received the query rows of training."""

    contexts: Tensor  # [R] recent query rows of each (expert, class)
    epoch_load: Tensor  # [K] query rows each expert received in this epoch
    recent_load: Tensor  # [K] ... and lately

    def count(self, layer: DSSoftmax, expert: Tensor, labels: Tensor) -> None:
        received = torch.bincount(expert, minlength=layer.n_experts)
        self.epoch_load += received
        self.recent_load += received
        row, held = layer.row_of(expert, labels)
        self.contexts.index_add_(0, row[held], torch.ones(int(held.sum())))


def save_checkpoint(
    folder: Path,
    progress: Progress,
    traffic: Traffic,
    encoder: nn.Module,
    layer: DSSoftmax,
    optimizer: torch.optim.Optimizer,
) -> None:
    path = folder / run_folder.CHECKPOINT
    temporary = path.with_suffix(".tmp")
    torch.save(
        {
            "progress": asdict(progress),
            "tallies": vars(traffic),  # the key in checkpoints of earlier versions
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
