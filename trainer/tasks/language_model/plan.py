"""Which layers a task trains: a TOML file with a table for each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from service.errors import DSSError
from trainer.training.config import METHOD_DEFAULTS, VectorsConfig, make_config, read_toml


class PlanInvalid(DSSError):
    pass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SVD:
    """A preview inside the experts that hold more than `above` classes."""

    window: int = Field(ge=1)
    share: float = Field(gt=0, le=1)
    above: int = Field(1000, ge=0)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PlannedLayer:
    title: str
    paper: str | None = None  # its name in the paper's tables
    of: str | None = None  # this layer's rows are another one's ...
    svd: SVD | None = None  # ... seen through a preview
    settings: dict[str, Any] = Field(default_factory=dict)  # that differ from the method's own

    def config(self, **more: Any) -> VectorsConfig:
        method = self.settings.get("method", "warm")
        return make_config(VectorsConfig, METHOD_DEFAULTS.get(method, {}), self.settings, more)


Plan = Mapping[str, PlannedLayer]


def read_plan(path: Path) -> Plan:
    try:
        plan = TypeAdapter(dict[str, PlannedLayer]).validate_python(read_toml(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PlanInvalid(f"{path} is wrong at {where}: {first['msg']}.") from error
    for name, layer in plan.items():
        if layer.of is None:
            layer.config()  # so that a wrong setting is found before any work
        elif layer.of not in plan or plan[layer.of].of is not None:
            raise PlanInvalid(f"{path}: {name} is made of {layer.of!r}, which is not trained.")
        elif layer.settings:
            raise PlanInvalid(f"{path}: {name} is made of {layer.of}, so it has no settings.")
    return plan
