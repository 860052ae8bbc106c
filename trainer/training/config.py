"""Every setting of a training run, with its default. TOML files hold only differences."""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from service.errors import DSSError

Config = TypeVar("Config", bound="TrainConfig")

# With more classes than this, the loss of a full softmax is estimated ...
SAMPLE_ABOVE = 20_000
SAMPLES = 4096  # ... from so many classes, drawn for each batch


# With more classes than this, a teacher's normalisers are estimated where they can be, and other
# defaults hold: else both would take longer than all the rest.
MANY_CLASSES = 100_000


class ConfigInvalid(DSSError):
    pass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TrainConfig:
    seed: int = 0

    # the layer
    n_experts: int = Field(10, ge=1)
    gate_noise: float = Field(1.0, ge=0)  # at the start; falls linearly to 0 ...
    gate_noise_epochs: float = Field(20.0, ge=0)  # ... over this many epochs

    # the optimizer (Adam)
    epochs: int = Field(60, ge=1)
    batch_size: int = Field(500, ge=1)
    learning_rate: float = Field(0.003, gt=0)
    learning_rate_end: float = Field(1.0, ge=0, le=1)  # share of it that is left at the end
    # Under 0.999 Adam soon forgets old task gradients, and the lasso shrinks rows without new ones.
    beta2: float = Field(0.99, gt=0, lt=1)

    # the objective
    lambda_lasso: float = Field(0.005, ge=0)
    lambda_expert: float = Field(0.005, ge=0)
    lambda_load: float = Field(10.0, ge=0)
    distil: float = Field(0.0, ge=0, le=1)  # weight of the full softmax's answers beside labels
    expert_lasso: Literal["coded", "printed"] = "coded"

    # idle experts become clones of overloaded ones before sparsity begins; 0: never
    rescue_every: int = Field(0, ge=0)  # steps

    # sparsity: lassos and pruning begin once the smoothed task loss is under `sparsify_below` and
    # no expert needs rescue, or at `sparsify_from_epoch`, whichever comes first
    sparsify_below: float = Field(1.0, ge=0)
    sparsify_from_epoch: float | None = None
    prune_threshold: float = Field(0.03, ge=0)  # gamma, on the root mean square of a weight row
    prune_every: int = Field(20, ge=1)  # steps
    pressure_growth: float = Field(1.1, ge=1)  # of the lassos at each pruning over the budget
    keep_one: bool = True
    proximal: bool = False  # class lasso by soft-thresholding after the step

    # the run
    checkpoint_seconds: float = Field(60.0, ge=0)
    threads: int | None = Field(None, ge=1)  # None: as many as PyTorch finds


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class VectorsConfig(TrainConfig):
    """For training on hidden vectors of the user."""

    # "accuracy": weight rows are learned from labels and head; "fidelity": they are the head's own
    objective: Literal["accuracy", "fidelity"] = "accuracy"
    method: Literal["warm", "mitosis", "dense"] = "warm"
    n_experts: int = Field(64, ge=1)
    gate_noise: float = Field(0.0, ge=0)
    epochs: int = Field(5, ge=1)  # of each round of the warm method; of the last stage of mitosis
    batch_size: int = Field(2000, ge=1)
    learning_rate: float = Field(0.002, gt=0)
    learning_rate_end: float = Field(0.02, ge=0, le=1)
    beta2: float = Field(0.999, gt=0, lt=1)
    lambda_load: float = Field(0.3, ge=0)
    sparsify_below: float = Field(0.0, ge=0)  # the warm method chooses classes by the budget alone
    distil: float = Field(0.5, ge=0, le=1)
    rows: float | None = Field(None, gt=0)  # budget: classes scored per answer, on average
    speedup: float | None = Field(None, gt=0)  # budget: N / (rows + K)
    train_rows: int | None = Field(None, ge=1)  # of the training vectors, at random; None: all
    sample_rows: int = Field(200_000, ge=1)  # for clusters and for choosing classes
    head_epochs: int = Field(5, ge=1)  # of a full softmax, if none is given

    # mitosis
    stage_epochs: int = Field(2, ge=1)  # of every stage but the last, on the sampled rows
    stage_memory: float = Field(1.4, gt=0)  # full softmaxes that its experts take at its end
    clone_noise: float = Field(0.01, ge=0)  # relative to the size of a weight row


# What mitosis and dense training set otherwise: there the lassos choose the classes.
LASSOS = {
    "batch_size": 1000,
    "lambda_lasso": 0.001,
    "lambda_expert": 0.0,
    "lambda_load": 0.1,
    "sparsify_from_epoch": 0.2,
    "prune_threshold": 0.01,
    "prune_every": 10,
    "proximal": True,
    "beta2": 0.995,
}
# With MANY_CLASSES there are few rows for each weight row, so that more epochs would memorise them,
# and a step's cost is mostly that of changing all weight rows, however many query rows it has.
MANY_CLASSES_DEFAULTS = {"epochs": 2, "batch_size": 4000}
# The more rows, the fewer pairs of expert and class that were never seen.
FIDELITY_DEFAULTS = {"sample_rows": 500_000}
METHOD_DEFAULTS: dict[str, dict[str, Any]] = {
    "warm": {},
    "mitosis": LASSOS | {"sample_rows": 100_000, "epochs": 6},
    "dense": LASSOS | {"epochs": 6},
}


def make_config(kind: type[Config], *differences: Mapping[str, Any]) -> Config:
    """The defaults of a task's config with differences laid over them, the last one winning."""
    merged: dict[str, Any] = {}
    for difference in differences:
        merged |= difference
    try:
        return TypeAdapter(kind).validate_python(merged)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            raise ConfigInvalid(f"There is no training setting {name!r}.") from error
        raise ConfigInvalid(f"The training setting {name!r} is wrong: {first['msg']}.") from error


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigInvalid(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{path} is not TOML: {error}.") from error


def parse_setting(text: str) -> dict[str, Any]:
    """`name=value`, the value as in TOML; a bare word is a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigInvalid(f"{text!r} is not of the form name=value.")
    try:
        return {name.strip(): tomllib.loads(f"value = {value}")["value"]}
    except tomllib.TOMLDecodeError:
        return {name.strip(): value.strip()}


def to_dict(config: TrainConfig) -> dict[str, Any]:
    return asdict(config)
