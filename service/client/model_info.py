"""What a server says about its models. Fields that only a newer server has are left out."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(frozen=True)
class ContractInfo:
    """What recall was calibrated for."""

    rows: int  # it was calibrated with
    levels: tuple[float, ...]  # recalls; above the last one all rows are scanned
    ks: tuple[int, ...]  # numbers of answers; above the last one likewise
    exact_only: tuple[float, ...] = ()  # of the recalls, those that only a scan of all rows keeps


@dataclass(frozen=True)
class VersionInfo:
    """A loaded version."""

    version: int
    n_classes: int
    hidden_size: int
    n_experts: int
    labels: bool  # whether its classes have labels
    created: str
    accuracy: float | None  # on the test rows of training
    trained_flops_speedup: float
    flops_speedup: float | None  # over the rows answered so far; None before any
    # A server that does not say so is older than these.
    objective: str = "accuracy"  # its rows were learned; fidelity: they are the output layer's own
    can_exact: bool = False  # it ships the output layer
    contract: ContractInfo | None = None  # None: recall was not calibrated


@dataclass(frozen=True)
class RefusedVersion:
    version: int
    reason: str


@dataclass(frozen=True)
class FoundVersion:
    version: int
    state: str  # loaded, loading, refused, not loaded
    reason: str | None  # why it is refused, or what is unusual about it


@dataclass(frozen=True)
class ModelInfo:
    name: str
    default: bool  # whether it answers requests that name no model
    version: int | None  # answers requests that name none
    versions: tuple[VersionInfo, ...]
    refused: tuple[RefusedVersion, ...]
    found: tuple[FoundVersion, ...]  # all versions, newest first
    labels: Mapping[str, int]  # version aliases: the version of each
    label_problems: Mapping[str, str]  # why an alias does not point where it should


@dataclass(frozen=True)
class ExpertInfo:
    expert: int
    classes: int
    trained_utilization: float  # share of training's test rows
    rows: int  # scored since the server's start
    utilization: float | None  # rows scored per row answered; None before any
    mean_seconds: float | None  # of one execution; None before any


# These raise KeyError or TypeError if the document has other fields or types.


def models(document: Any) -> list[ModelInfo]:  # noqa: ANN401
    return [model(entry) for entry in document["models"]]


def model(document: Any) -> ModelInfo:  # noqa: ANN401
    nested = {
        "versions": tuple(_version(entry) for entry in document["versions"]),
        "refused": _all(RefusedVersion, document["refused"]),
        "found": _all(FoundVersion, document["found"]),
    }
    found: ModelInfo = _one(ModelInfo, {**document, **nested})
    return found


def _version(document: Any) -> VersionInfo:  # noqa: ANN401
    contract = document.get("contract")
    if contract is not None:
        lists = {name: tuple(found) for name, found in contract.items() if name != "rows"}
        contract = _one(ContractInfo, {**contract, **lists})
    found: VersionInfo = _one(VersionInfo, {**document, "contract": contract})
    return found


def experts(document: Any) -> list[ExpertInfo]:  # noqa: ANN401
    return list(_all(ExpertInfo, document["experts"]))


def samples(document: Any) -> NDArray[np.float32]:  # noqa: ANN401
    return np.array(document["samples"], np.float32)


def _all(kind: type[T], documents: Any) -> tuple[T, ...]:  # noqa: ANN401
    return tuple(_one(kind, document) for document in documents)


def _one(kind: Any, document: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Fields with a default may be absent."""
    absent = {f.name for f in fields(kind) if f.default is not MISSING} - document.keys()
    names = [field.name for field in fields(kind) if field.name not in absent]
    return kind(**{name: document[name] for name in names})
