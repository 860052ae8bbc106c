"""`dss compare`: every method on the same vectors, on the same machine, each swept over its dial.

Settings are measured and chosen on validation rows. The test split, if there is one, is then read
once for each setting that is reported: the chosen one of each method, those of the paper, and each
given bundle searching one expert.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from service.bundle.manifest import RECALL_AT
from service.errors import DSSError
from service.system.machine import machine
from service.terminal import progress
from trainer.baselines.adaptive import Adaptive
from trainer.baselines.bundle import Served
from trainer.baselines.d_softmax import DSoftmax
from trainer.baselines.fgd import FGD
from trainer.baselines.ivf import FaissIVF
from trainer.baselines.measurement import Record, Split, digest, latencies, measured, spread
from trainer.baselines.method import (
    Baseline,
    Dial,
    Inputs,
    Options,
    PackageMissing,
    Search,
    key_of,
)
from trainer.baselines.retrained import FullRetrained
from trainer.baselines.scan import Full, FullInt8
from trainer.baselines.scann_tree import Scann
from trainer.baselines.screening import Screening
from trainer.baselines.svd import SVD
from trainer.data.arrays import Head, Vectors
from trainer.evaluation.full_scan import LARGEST_MODEL

METHODS: tuple[type[Baseline], ...] = (
    Full,
    FullInt8,
    SVD,
    FGD,
    FaissIVF,
    Scann,
    Screening,
    Adaptive,
    DSoftmax,
    FullRetrained,
)
RECORD = "points.json"
TOLERANCE = 0.0005  # of accuracy that a chosen setting may lose against the full softmax
PACKAGES = ("onnxruntime", "numba", "numpy", "torch", "faiss-cpu", "scann")


class MethodUnknown(DSSError):
    pass


class HeadUnsuitable(DSSError):
    pass


@dataclass(frozen=True)
class Point:
    """One setting of one method on one split."""

    baseline: Baseline
    dial: Dial
    split: str
    figures: dict[str, Any]  # accuracy, precision, flops_speedup, train_seconds, build_seconds
    latency_us: float | None = None
    chosen: bool = False

    @property
    def group(self) -> tuple[str, str]:
        """Points that one is chosen of: a method's settings, or a bundle's."""
        served = isinstance(self.baseline, Served)
        return self.baseline.method, self.dial.name if served else ""

    @property
    def reported(self) -> bool:
        """Is it measured on the test split as well?"""
        plainly_served = self.dial.settings.get("experts_searched") == 1
        return self.chosen or self.dial.paper is not None or plainly_served

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.baseline.method,
            "name": self.dial.name,
            "dial": dict(self.dial.settings),
            "split": self.split,
            "chosen": self.chosen,
            "paper": self.dial.paper,
            "accuracy": self.figures["accuracy"],
            "precision": self.figures["precision"],
            "flops_speedup": self.figures["flops_speedup"],
            "latency_us": self.latency_us,
            "train_seconds": self.figures["train_seconds"],
            "build_seconds": self.figures["build_seconds"],
        }


def compare(
    training: Vectors,
    head: Head,
    valid: Vectors,
    test: Vectors | None,
    work: Path,
    *,
    bundles: Mapping[str, Path] | None = None,
    methods: Sequence[str] | None = None,
    options: Options | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure `methods` (None: all) and bundles by name; what is finished is kept in `work`."""
    options = options or Options()
    types = chosen_types(methods)
    check_head(head)
    served = [Served(name, path, head) for name, path in (bundles or {}).items()]
    work.mkdir(parents=True, exist_ok=True)
    inputs = Inputs(
        training, head, work, digest(training.hidden, training.labels, head.weight), options
    )
    baselines, skipped = build_baselines(types, inputs)
    comparison = _Comparison(inputs, Record(work / RECORD), say)

    split = Split(valid, spread(len(valid.labels), options.rows), head)
    points = comparison.sweep([*baselines, *served], split)
    if options.latency:
        points = comparison.with_latencies(points, split)
    points = with_choices(points, split.full_accuracy)
    rows, full = {"valid": len(split.rows), "test": None}, {"valid": split.full_accuracy}
    tested: list[Point] = []
    if test is not None:
        last = Split(test, spread(len(test.labels), None), head)
        tested = comparison.test([point for point in points if point.reported], last)
        rows["test"], full["test"] = len(last.rows), last.full_accuracy
    return {
        "n_classes": inputs.n_classes,
        "hidden_size": inputs.hidden_size,
        "machine": machine(*(name for name in PACKAGES if _installed(name))),
        "rows": rows,
        "dials": "valid",
        "full": {"test": None, **full},
        "points": [*(point.to_json() for point in [*points, *tested]), *skipped],
    }


def chosen_types(methods: Sequence[str] | None) -> list[type[Baseline]]:
    by_name = {baseline.method: baseline for baseline in METHODS}
    if methods is None:
        return list(METHODS)
    for name in methods:
        if name not in by_name:
            raise MethodUnknown(f"There is no method {name!r}, only {', '.join(by_name)}.")
    return [by_name[name] for name in dict.fromkeys(methods)]


def check_head(head: Head) -> None:
    if head.bias is not None:
        raise HeadUnsuitable("Methods are compared on heads without a bias.")
    if len(head.weight) <= RECALL_AT[-1]:
        raise HeadUnsuitable(f"The head has {len(head.weight)} classes; more than 10 are needed.")
    if head.weight.nbytes > LARGEST_MODEL:
        raise HeadUnsuitable("The head is too large for one ONNX model.")


def build_baselines(
    types: Sequence[type[Baseline]], inputs: Inputs
) -> tuple[list[Baseline], list[dict[str, str]]]:
    found, skipped = [], []
    for baseline in types:
        try:
            found.append(baseline(inputs))
        except PackageMissing as missing:
            skipped.append({"method": baseline.method, "skipped": str(missing)})
    return found, skipped


def with_choices(points: list[Point], full: dict[str, float]) -> list[Point]:
    """Mark the best setting of each group of validation points."""
    groups: dict[tuple[str, str], list[int]] = {}
    for place, point in enumerate(points):
        groups.setdefault(point.group, []).append(place)
    best = {
        places[choose([points[place].figures for place in places], full)]
        for places in groups.values()
    }
    return [replace(point, chosen=place in best) for place, point in enumerate(points)]


def choose(settings: Sequence[dict[str, Any]], full: dict[str, float]) -> int:
    """The quickest setting as accurate as the full softmax at 1, 5 and 10, within the tolerance;
    the most accurate on average if there is none, or between equally quick ones."""

    def mean(place: int) -> float:
        return sum(settings[place]["accuracy"].values()) / len(full)

    lossless = [
        place
        for place, figures in enumerate(settings)
        if all(figures["accuracy"][k] >= full[k] - TOLERANCE for k in full)
    ]
    if not lossless:
        return max(range(len(settings)), key=mean)
    return max(lossless, key=lambda place: (settings[place]["flops_speedup"], mean(place)))


class _Comparison:
    """Measures points that the record does not have yet, and builds what that takes."""

    def __init__(self, inputs: Inputs, record: Record, say: Callable[[str], None]) -> None:
        self._inputs = inputs
        self._record = record
        self._say = say
        self._built: dict[str, Search] = {}

    def sweep(self, baselines: Sequence[Baseline], split: Split) -> list[Point]:
        """Every setting of every method on validation rows."""
        of_split = digest(split.vectors.hidden, split.vectors.labels)
        settings = [(baseline, dial) for baseline in baselines for dial in baseline.dials()]
        return [
            self._point(baseline, dial, "valid", split, of_split)
            for baseline, dial in progress.each(settings, "settings")
        ]

    def test(self, points: Sequence[Point], split: Split) -> list[Point]:
        """The same settings on the test split."""
        of_split = digest(split.vectors.hidden, split.vectors.labels)
        return [
            replace(
                self._point(point.baseline, point.dial, "test", split, of_split),
                latency_us=point.latency_us,
                chosen=point.chosen,
            )
            for point in progress.each(points, "settings, on test rows")
        ]

    def with_latencies(self, points: list[Point], split: Split) -> list[Point]:
        """All in turns, so as soon as one is missing all are timed."""
        key = key_of("latency", [self._key(point.baseline, point.dial) for point in points])
        kept = self._record.get(key)
        if kept is None:
            searches = [self._search(point.baseline, point.dial) for point in points]
            kept = {"latency_us": latencies(searches, split)}
            self._record.put(key, kept)
        pairs = zip(points, kept["latency_us"], strict=True)
        return [replace(point, latency_us=time) for point, time in pairs]

    def _point(
        self, baseline: Baseline, dial: Dial, name: str, split: Split, of_split: str
    ) -> Point:
        key = key_of(self._key(baseline, dial), name, of_split, len(split.rows))
        figures = self._record.get(key)
        if figures is None:
            search = self._search(baseline, dial)
            figures = {
                **measured(search, split),
                "train_seconds": _rounded(search.train_seconds),
                "build_seconds": _rounded(search.build_seconds),
            }
            self._record.put(key, figures)
        point = Point(baseline, dial, name, figures)
        self._say(line(point))
        return point

    def _key(self, baseline: Baseline, dial: Dial) -> str:
        settings = dict(dial.settings)
        return key_of(baseline.method, dial.name, settings, baseline.facts(), self._inputs.digest)

    def _search(self, baseline: Baseline, dial: Dial) -> Search:
        """Kept only if latencies are wanted: then all take turns."""
        key = self._key(baseline, dial)
        found = self._built.get(key) or baseline.build(dial)
        if self._inputs.options.latency:
            self._built[key] = found
        return found


def line(point: Point) -> str:
    accuracy = " ".join(f"{share:.4f}" for share in point.figures["accuracy"].values())
    precision = " ".join(f"{share:.4f}" for share in point.figures["precision"].values())
    searched = point.dial.settings.get("experts_searched")
    name = point.dial.name + (f", experts searched: {searched}" if searched else "")
    return (
        f"{point.split:<5} {point.baseline.method:<14} {name:<36}"
        f" {accuracy}  {precision} {point.figures['flops_speedup']:>8.2f}x"
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
