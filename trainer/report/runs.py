"""What a report reads: run folders, recognised by their files.

K experts, N classes.
"""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ValidationError

from service.bundle.manifest import RECALL_AT
from service.errors import DSSError
from trainer.data import run_folder
from trainer.tasks.language_model import hidden_states

RANKS = tuple(str(k) for k in RECALL_AT)  # as JSON names them
HARDLY_USED = 0.001  # of all rows; an expert that gets fewer


class NotARun(DSSError):
    pass


class RunUnreadable(DSSError):
    pass


class ResultsMalformed(DSSError):
    pass


# --- results.json of the language-model task ----------------------------------------------------


def _has_ranks(shares: dict[str, float]) -> dict[str, float]:
    missing = [rank for rank in RANKS if rank not in shares]
    if missing:
        raise ValueError(f"no share at {', '.join(missing)}")
    return shares


AtRanks = Annotated[dict[str, float], AfterValidator(_has_ranks)]
Split = Literal["valid", "test"]


class Point(BaseModel):
    """One setting of one method, measured."""

    method: str
    name: str
    dial: dict[str, Any] = {}
    split: Split
    chosen: bool = False
    paper: str | None = None
    accuracy: AtRanks
    precision: AtRanks | None = None
    flops_speedup: float | None = None
    latency_us: float | None = None
    train_seconds: float | None = None
    build_seconds: float | None = None


class Skipped(BaseModel):
    method: str
    skipped: str


class Comparison(BaseModel):
    n_classes: int
    hidden_size: int
    machine: dict[str, Any]
    rows: dict[Split, int | None]
    full: dict[Split, AtRanks | None]
    points: list[Skipped | Point]

    @property
    def measured(self) -> list[Point]:
        return [point for point in self.points if isinstance(point, Point)]

    @property
    def skipped(self) -> list[Skipped]:
        return [point for point in self.points if isinstance(point, Skipped)]


class Layer(BaseModel):
    title: str
    paper: str | None = None
    keep_one: bool
    n_experts: int
    method: str
    speedup_asked: float | None = None
    train_seconds: float | None = None
    svd: dict[str, Any] | None = None

    @property
    def kind(self) -> str:
        if self.svd is not None:
            return "SVD inside"
        if self.method == "mitosis":
            return "mitosis"
        return "keep-one" if self.keep_one else "without keep-one"


class Stage(BaseModel):
    experts: int
    accuracy: AtRanks
    flops_speedup: float
    split: Split
    peak_memory: float | None = None
    rows: int | None = None


class MemoryPoint(BaseModel):
    step: float
    experts: int
    memory: float  # in full softmaxes


class Mitosis(BaseModel):
    layer: str
    peak_memory: float
    stages: list[Stage]
    memory: list[MemoryPoint]


class Results(BaseModel):
    corpus: str
    command: str | None = None
    encoder: dict[str, Any]
    layers: dict[str, Layer]
    comparison: Comparison
    mitosis: Mitosis | None = None


def parse_results(content: object, where: str = run_folder.RESULTS) -> Results:
    try:
        return Results.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ResultsMalformed(
            f"{where} is not what a comparison writes: {place}: {first['msg'].lower()}."
        ) from error


# --- run folders --------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerFacts:
    """A trained layer as its pictures need it."""

    title: str
    held: NDArray[np.bool_]  # [K,N]: which expert holds which class
    utilization: NDArray[np.float64]  # [K]
    frequencies: NDArray[np.int64] | None  # [N] in the training text
    words: Sequence[str] | None  # [N]

    @property
    def sizes(self) -> NDArray[np.int64]:
        return self.held.sum(1)

    @property
    def copies(self) -> NDArray[np.int64]:
        return self.held.sum(0)

    @property
    def out_of_reach(self) -> int:
        """Classes whose only copies are in experts that hardly any row comes to."""
        reached = self.held[self.utilization >= HARDLY_USED].any(0)
        return int((self.held.any(0) & ~reached).sum())


@dataclass(frozen=True)
class LanguageModelRun:
    name: str
    config: dict[str, Any]
    results: Results
    pictured: dict[str, LayerFacts]  # keep-one layers with the most experts


@dataclass(frozen=True)
class LayerRun:
    name: str
    config: dict[str, Any]
    summary: dict[str, Any]
    layer: LayerFacts
    memory: list[MemoryPoint]  # empty if its training kept no such log


Run = LanguageModelRun | LayerRun


def open_run(folder: Path) -> Run:
    config = folder / run_folder.CONFIG
    if not config.is_file():
        raise NotARun(f"{folder} holds no run.")
    settings = _read_json(config)
    match settings.get("task"):
        case "language-model":
            return _open_language_model(folder, settings)
        case "vectors":
            return _open_layer_run(folder, settings, _own_words(folder, settings))
        case "synthetic":
            return _open_layer_run(folder, settings, _names(folder / run_folder.LABELS))
        case other:
            raise NotARun(f"The run in {folder} is of a task no report is known for: {other!r}.")


def _open_language_model(folder: Path, config: dict[str, Any]) -> LanguageModelRun:
    words = _names(folder / hidden_states.FOLDER / run_folder.LABELS)
    labels = hidden_states.labels_file(folder / hidden_states.FOLDER, "train")
    file = folder / run_folder.RESULTS
    if not file.is_file() or words is None or not labels.is_file():
        raise run_folder.RunUnfinished(f"The run in {folder} has not finished; resume it first.")
    results = parse_results(_read_json(file), str(file))
    unknown = {p.name for p in results.comparison.measured if p.method == "ds"} - {*results.layers}
    if unknown:
        raise ResultsMalformed(
            f"{folder / run_folder.RESULTS} measures layers it does not list: {unknown}."
        )
    kept = {n: layer for n, layer in results.layers.items() if layer.keep_one and not layer.svd}
    most = max((layer.n_experts for layer in kept.values()), default=0)
    pictured = {
        name: _read_layer(folder / run_folder.LAYERS / name, layer.title, words, labels)
        for name, layer in kept.items()
        if layer.n_experts == most
    }
    return LanguageModelRun(_name(folder), config, results, pictured)


def _open_layer_run(folder: Path, config: dict[str, Any], words: Sequence[str] | None) -> LayerRun:
    labels = Path(config["labels"]) if config.get("labels") else None
    layer = _read_layer(folder, _name(folder), words, labels)
    summary = _read_json(folder / run_folder.SUMMARY)
    return LayerRun(_name(folder), config, summary, layer, _memory(folder))


def _memory(folder: Path) -> list[MemoryPoint]:
    file = folder / run_folder.GROWTH
    if not file.is_file():
        return []
    try:
        points = json.loads(file.read_text())["memory"]
        return [MemoryPoint.model_validate(point) for point in points]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunUnreadable(f"The memory log in {folder} cannot be read.") from error


def _read_layer(
    folder: Path, title: str, words: Sequence[str] | None, labels: Path | None
) -> LayerFacts:
    if not (folder / run_folder.LAYER).is_file() or not (folder / run_folder.SUMMARY).is_file():
        raise run_folder.RunUnfinished(f"The run in {folder} has not finished; resume it first.")
    try:
        # Opened here, for numpy leaves open what turns out to be no archive.
        with (
            (folder / run_folder.LAYER).open("rb") as file,
            np.load(file, allow_pickle=False) as arrays,
        ):
            keys, n_classes = arrays["keys"], int(arrays["n_classes"])
            held = np.zeros((len(arrays["gate"]), n_classes), bool)
        held[keys // n_classes, keys % n_classes] = True
        utilization = np.array(_read_json(folder / run_folder.SUMMARY)["utilization"], np.float64)
    except (OSError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        raise RunUnreadable(f"The layer in {folder} cannot be read.") from error
    if len(utilization) != len(held):
        raise RunUnreadable(f"The layer in {folder} does not fit its summary.")
    return LayerFacts(
        title,
        held,
        utilization,
        _frequencies(labels, n_classes),
        words if words is not None and len(words) == n_classes else None,
    )


def _own_words(folder: Path, config: dict[str, Any]) -> Sequence[str] | None:
    """Names in the run itself, or else beside the labels it was trained on."""
    beside = Path(config["labels"]).parent if config.get("labels") else folder
    return _names(folder / run_folder.LABELS) or _names(beside / run_folder.LABELS)


def _names(path: Path) -> Sequence[str] | None:
    if not path.is_file():
        return None
    try:
        return path.read_bytes().decode().removesuffix("\n").split("\n")
    except (OSError, ValueError) as error:
        raise RunUnreadable(f"{path} cannot be read.") from error


def _frequencies(labels: Path | None, n_classes: int) -> NDArray[np.int64] | None:
    """How often each class was the label in training, if the file of labels still exists."""
    if labels is None or not labels.is_file():
        return None
    try:
        counts = np.bincount(np.load(labels, allow_pickle=False), minlength=n_classes)
    except (OSError, ValueError, TypeError) as error:
        raise RunUnreadable(f"{labels} cannot be read.") from error
    return counts if len(counts) == n_classes else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunUnreadable(f"{path} cannot be read.") from error
    if not isinstance(content, dict):
        raise RunUnreadable(f"{path} cannot be read.")
    return content


def _name(folder: Path) -> str:
    return folder.resolve().name
