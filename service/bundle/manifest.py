"""manifest.json, which describes a bundle; it is checked before any other file is read."""

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from service import errors
from service.bundle.contract import Contract
from service.bundle.format import (
    CLASSES,
    EXPERTS,
    GATE,
    HEAD,
    HEAD_GRAPH,
    HEAD_VERSION,
    HEAD_WEIGHTS,
    LABELS,
    MANIFEST,
    OFFSETS,
    QUANTISED,
    QUANTISED_TYPE,
    READABLE_VERSIONS,
    REST,
    ROW_FILES,
    ROW_TYPE,
    ROWS_VERSION,
    SAMPLES,
    STORED,
    WEIGHTS,
    Objective,
    Precision,
    expert_file,
)
from service.bundle.manifest_values import check_density, check_values

NO_CHECKSUM = "0" * 64
LARGEST_MANIFEST = 2**24  # of 100,000 experts
MOST_GATE_EDGES = 9
RECALL_AT = (1, 5, 10)  # places k at which recall@k and accuracy@k are measured

Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class GateFacts(BaseModel):
    """A histogram of the best gate values: the shares of rows whose value was at most the first
    edge, between that and the second, and so on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    edges: list[Annotated[float, Field(allow_inf_nan=False)]] = Field(max_length=MOST_GATE_EDGES)
    shares: list[Share]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if sorted(set(self.edges)) != self.edges or len(self.shares) != len(self.edges) + 1:
            raise ValueError("edges must ascend, and there is one share more than edges")
        return self


class TrainingFacts(BaseModel):
    """What training measured on its test rows; a server compares live traffic with it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    utilization: list[Share]
    flops_speedup: float = Field(gt=0, allow_inf_nan=False)
    accuracy: float | None = Field(default=None, allow_inf_nan=False)
    full_accuracy: float | None = Field(default=None, allow_inf_nan=False)
    gates: GateFacts | None = None
    # At each of RECALL_AT: the share of the full softmax's best k that is among the layer's own.
    head_recall: dict[Literal["1", "5", "10"], Share] | None = None


class FileEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: int
    precision: Precision = "fp32"
    checksum: str = Field(pattern="^[0-9a-f]{64}$")
    created: str
    producer: str
    n_classes: int = Field(ge=1, le=2**31 - 1)
    hidden_size: int = Field(ge=1)
    n_experts: int = Field(ge=1)
    expert_sizes: list[int]
    labels: bool
    samples: int = Field(ge=0)
    training: TrainingFacts
    head: bool = False  # the bundle holds the full softmax
    objective: Objective = "accuracy"
    contract: Contract | None = None
    files: dict[str, FileEntry]

    @property
    def rows_folder(self) -> str | None:
        """Where the head's rows lie, as they are and in whole steps; None if it has none such."""
        if not self.head or self.format_version < ROWS_VERSION:
            return None
        return EXPERTS if self.objective == "fidelity" else HEAD


def read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    if not path.exists():
        raise errors.BundleMissing(
            f"There is no folder {path}; a bundle is one such as models/demo/1."
        )
    if not file.is_file():
        raise errors.BundleMissing(f"{path} holds no {MANIFEST}, so it is not a bundle.")
    check_within(path, MANIFEST)
    if file.stat().st_size > LARGEST_MANIFEST:
        raise errors.ManifestMalformed(f"{MANIFEST} has more than {LARGEST_MANIFEST} bytes.")
    content = file.read_bytes()
    check_density(content)
    try:
        fields = json.loads(content)
        found = fields["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise errors.ManifestMalformed(f"{MANIFEST} is not a JSON manifest.") from error
    check_values(fields)
    if found not in READABLE_VERSIONS or isinstance(found, bool):
        raise errors.UnknownFormatVersion(
            f"The bundle has format version {repr(found)[:40]}; this release reads 1 to 4."
        )
    if found == 1 and "precision" in fields:
        raise errors.ManifestMalformed(f"{MANIFEST} of version 1 states a precision.")
    if found < HEAD_VERSION and "head" in fields:
        raise errors.ManifestMalformed(f"{MANIFEST} of version {found} states a head.")
    for key in ("objective", "contract"):
        if found < ROWS_VERSION and key in fields:
            raise errors.ManifestMalformed(f"{MANIFEST} of version {found} states the {key}.")
    _check_manifest_checksum(content, fields.get("checksum"))
    try:
        manifest = Manifest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise errors.ManifestMalformed(
            f"{MANIFEST} is wrong at {where}: {first['msg']}."
        ) from error
    _check_counts(manifest)
    _check_objective(manifest)
    _check_file_set(manifest)
    _check_matrix_sizes(manifest)
    return manifest


def _check_manifest_checksum(content: bytes, checksum: object) -> None:
    if not isinstance(checksum, str) or content.count(checksum.encode()) != 1 or not checksum:
        raise errors.ManifestMalformed(f"{MANIFEST} does not state its checksum once.")
    if sha256(content.replace(checksum.encode(), NO_CHECKSUM.encode())) != checksum:
        raise errors.ManifestAltered(f"{MANIFEST} does not match its own checksum.")


def _check_counts(manifest: Manifest) -> None:
    n_experts, n_classes = manifest.n_experts, manifest.n_classes
    if len(manifest.expert_sizes) != n_experts:
        count = len(manifest.expert_sizes)
        raise errors.ShapeWrong(f"{MANIFEST} lists {count} expert sizes for {n_experts} experts.")
    if not all(0 <= size <= n_classes for size in manifest.expert_sizes):
        raise errors.ShapeWrong(f"{MANIFEST} has an expert size outside 0..{n_classes}.")
    if not any(manifest.expert_sizes):
        raise errors.ShapeWrong("No expert of the bundle holds a class.")
    if len(manifest.training.utilization) != n_experts:
        raise errors.ShapeWrong(f"{MANIFEST} needs one training utilization for each expert.")


def _check_objective(manifest: Manifest) -> None:
    if manifest.format_version >= ROWS_VERSION and not manifest.head:
        raise errors.ManifestMalformed(f"{MANIFEST} of version 4 states no head.")
    contract, faithful = manifest.contract, manifest.objective == "fidelity"
    if faithful and manifest.precision != "int8":
        raise errors.ManifestMalformed(f"{MANIFEST} of a fidelity bundle states another precision.")
    if contract is None:
        return
    if not faithful:
        raise errors.ManifestMalformed(f"{MANIFEST} of an accuracy bundle states a contract.")
    if any(len(numbers) != manifest.n_experts for numbers in contract.experts):
        raise errors.ShapeWrong(f"The contract needs one number for each expert in {MANIFEST}.")


def _check_file_set(manifest: Manifest) -> None:
    for name in manifest.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise errors.PathLeavesBundle(f"{MANIFEST} names {name!r}, which leaves the bundle.")
    experts = {expert_file(e) for e, size in enumerate(manifest.expert_sizes) if size}
    expected = {GATE, OFFSETS, CLASSES, *experts}
    if manifest.format_version > 1:
        expected |= {f"experts/{WEIGHTS}"}
        expected |= {f"experts/{QUANTISED}"} if manifest.precision == "int8" else set()
    if manifest.rows_folder is not None:
        expected |= {f"{manifest.rows_folder}/{name}" for name in ROW_FILES}
        expected |= {REST} if manifest.objective == "fidelity" else set()
    elif manifest.head:
        expected |= {HEAD_GRAPH, HEAD_WEIGHTS}
    expected |= {LABELS} if manifest.labels else set()
    expected |= {SAMPLES} if manifest.samples else set()
    for name in sorted(expected ^ manifest.files.keys()):
        problem = "does not list" if name in expected else "lists the unexpected file"
        raise errors.FileSetWrong(f"{MANIFEST} {problem} {name!r}.")


def _check_matrix_sizes(manifest: Manifest) -> None:
    numbers = sum(manifest.expert_sizes) * manifest.hidden_size
    stored = STORED[manifest.precision][1]
    head_numbers = manifest.n_classes * manifest.hidden_size
    expected = {
        f"experts/{WEIGHTS}": numbers * stored.itemsize,
        f"experts/{QUANTISED}": numbers * QUANTISED_TYPE.itemsize,
        HEAD_WEIGHTS: head_numbers * stored.itemsize,
    }
    if manifest.rows_folder is not None:
        expected |= {
            f"{manifest.rows_folder}/{WEIGHTS}": head_numbers * ROW_TYPE.itemsize,
            f"{manifest.rows_folder}/{QUANTISED}": head_numbers * QUANTISED_TYPE.itemsize,
        }
    for name, size in expected.items():
        entry = manifest.files.get(name)
        if entry is not None and entry.bytes != size:
            raise errors.ShapeWrong(f"{name} has {entry.bytes} bytes, not {size}.")


def check_within(folder: Path, name: str) -> None:
    if not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise errors.PathLeavesBundle(f"{name} is a link that leaves the bundle.")


def sha256(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()
