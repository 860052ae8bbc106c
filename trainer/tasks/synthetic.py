"""The synthetic task: sub-clusters are the classes, super-clusters the hierarchy to be found.

The layer never sees which super-cluster a class belongs to. It has learned the hierarchy when each
expert ends up with the classes of one super-cluster.

S super-clusters, C sub-clusters in each, N = S * C classes, d input dimensions, K experts.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from service.bundle import flops_speedup
from service.errors import DSSError
from service.terminal.phases import Phases
from trainer.baselines.full import full_softmax_accuracy
from trainer.data import run_folder
from trainer.data.files import write_json, write_whole
from trainer.layer import DSSoftmax
from trainer.tasks.synthetic_picture import draw_experts
from trainer.training import metrics
from trainer.training.config import TrainConfig, read_toml, to_dict
from trainer.training.loop import Data, train

INPUT_SIZE = 100
HIDDEN_SIZE = 100
DROPOUT = 0.2
# The paper's variances d^3, d^2 and d, for d = 10.
SUPER_VARIANCE, SUB_VARIANCE, ITEM_VARIANCE = 1000.0, 100.0, 10.0
PRESETS = Path(__file__).parent
ABLATIONS = {
    "lasso": {"lambda_lasso": 0.0},
    "expert-lasso": {"lambda_expert": 0.0},
    "both-lassos": {"lambda_lasso": 0.0, "lambda_expert": 0.0},
    "balance": {"lambda_load": 0.0},
}


@pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SyntheticConfig(TrainConfig):
    items_per_class: int = Field(100, ge=1)
    test_items_per_class: int = Field(20, ge=1)
    input_scale: float = Field(1.0, gt=0)  # standard deviation of the inputs


class SizeUnknown(DSSError):
    pass


@dataclass(frozen=True)
class Size:
    n_super: int
    n_sub: int

    @property
    def n_classes(self) -> int:
        return self.n_super * self.n_sub

    def __str__(self) -> str:
        return f"{self.n_super}x{self.n_sub}"


def parse_size(text: str) -> Size:
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text)
    if not found:
        raise SizeUnknown(f"{text!r} is not a size such as 10x10.")
    return Size(int(found[1]), int(found[2]))


def preset(size: Size) -> dict[str, Any]:
    """What differs from the defaults at this size; other sizes have as many experts as clusters."""
    path = PRESETS / f"synthetic-{size}.toml"
    return read_toml(path) if path.exists() else {"n_experts": size.n_super}


def generate(size: Size, items_per_class: int, seed: int) -> Tensor:
    """Inputs of unit variance around the centre of their sub-cluster: [N, items, d]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, variance: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * variance**0.5

    supers = normal(size.n_super, 1, INPUT_SIZE, variance=SUPER_VARIANCE)
    subs = supers + normal(size.n_super, size.n_sub, INPUT_SIZE, variance=SUB_VARIANCE)
    subs = subs.reshape(size.n_classes, 1, INPUT_SIZE)
    items = subs + normal(size.n_classes, items_per_class, INPUT_SIZE, variance=ITEM_VARIANCE)
    return items / (SUPER_VARIANCE + SUB_VARIANCE + ITEM_VARIANCE) ** 0.5


def split(items: Tensor, n_test: int) -> tuple[Data, Data]:
    """Training and test rows of every class, from [N, items, d]."""

    def rows(part: Tensor) -> Data:
        labels = torch.arange(len(part)).repeat_interleave(part.shape[1])
        return Data(part.reshape(-1, part.shape[2]), labels)

    return rows(items[:, n_test:]), rows(items[:, :n_test])


def make_encoder() -> nn.Module:
    """The first layer of the two-layer perceptron; the output layer is the second."""
    return nn.Sequential(nn.Dropout(DROPOUT), nn.Linear(INPUT_SIZE, HIDDEN_SIZE), nn.ReLU())


def label_names(size: Size) -> list[str]:
    return [f"super {i} / sub {j}" for i in range(size.n_super) for j in range(size.n_sub)]


# --- the whole experiment ---------------------------------------------------------------------


def run(
    size: Size,
    config: SyntheticConfig,
    folder: Path,
    *,
    resume: bool = False,
    baseline: bool = True,
    clock: Phases | None = None,
) -> dict[str, Any]:
    """Generate, train, compare with a full softmax, draw; returns what summary.json holds.

    Every figure is of test rows, which nothing learns from and on which nothing is chosen. The
    clock may have begun before.
    """
    clock = Phases() if clock is None else clock
    run_folder.open_run(
        folder, {"task": "synthetic", "size": str(size), **to_dict(config)}, resume=resume
    )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    items = generate(size, config.test_items_per_class + config.items_per_class, config.seed)
    training, test = split(items * config.input_scale, config.test_items_per_class)

    torch.manual_seed(config.seed)
    encoder = make_encoder()
    layer = DSSoftmax(HIDDEN_SIZE, size.n_classes, config.n_experts)
    with clock.phase("learning"):
        train(config, encoder, layer, training, folder, resume=resume)

    encoder.eval()
    layer.eval()
    with torch.no_grad():
        hidden = encoder(test.inputs)  # [M,D]
    utilization = metrics.utilization(layer, hidden).tolist()
    found = hierarchy(layer, hidden, test.labels, size)
    summary: dict[str, Any] = {
        "task": "synthetic",
        "size": str(size),
        "seed": config.seed,
        "accuracy": metrics.accuracy(layer, hidden, test.labels),
        "full_accuracy": None,
        "purity": found.purity,
        "mean_copies": metrics.copies(layer).double().mean().item(),
        "flops_speedup": flops_speedup(size.n_classes, layer.expert_sizes, utilization),
        "utilization": utilization,
    }
    if baseline:
        torch.manual_seed(config.seed)
        with clock.phase("full softmax"):
            summary["full_accuracy"] = full_softmax_accuracy(
                config, make_encoder(), HIDDEN_SIZE, size.n_classes, training, test
            )
        summary["full_seconds"] = round(clock.seconds["full softmax"], 1)
    run_folder.save_layer(folder, layer, sample_rows(hidden, size).numpy())
    write_whole(folder / run_folder.LABELS, "".join(f"{n}\n" for n in label_names(size)).encode())
    draw_experts(layer, folder / run_folder.PICTURE, order=found.expert_order, groups=size.n_super)
    summary |= clock.figures()
    write_json(folder / run_folder.SUMMARY, summary)
    return summary


@dataclass(frozen=True)
class Hierarchy:
    purity: float  # share of classes held by exactly the expert of their super-cluster
    expert_order: NDArray[np.int64]  # [K] experts by super-cluster, unmatched ones last


def hierarchy(layer: DSSoftmax, hidden: Tensor, labels: Tensor, size: Size) -> Hierarchy:
    """Match experts to super-clusters one to one by the rows they receive; then look at classes."""
    received = np.zeros((layer.n_experts, size.n_super))
    np.add.at(received, (layer.route(hidden).expert.numpy(), labels.numpy() // size.n_sub), 1)
    experts, supers = linear_sum_assignment(received, maximize=True)
    expert_of_super = np.full(size.n_super, -1)
    expert_of_super[supers] = experts

    rows, classes = layer.expert_of_row.numpy(), layer.class_of_row.numpy()
    right = expert_of_super[classes // size.n_sub] == rows  # [R]
    n_right = np.bincount(classes[right], minlength=size.n_classes)
    n_wrong = np.bincount(classes[~right], minlength=size.n_classes)
    matched = experts[np.argsort(supers)]
    others = np.setdiff1d(np.arange(layer.n_experts), matched)
    return Hierarchy(
        purity=float(np.mean((n_right == 1) & (n_wrong == 0))),
        expert_order=np.concatenate([matched, others]),
    )


def sample_rows(hidden: Tensor, size: Size) -> Tensor:
    """The first test row of some classes spread over all super-clusters, at most 1,000 rows."""
    per_class = len(hidden) // size.n_classes
    chosen = torch.linspace(0, size.n_classes - 1, min(1000, size.n_classes)).long()
    return hidden[chosen * per_class]
