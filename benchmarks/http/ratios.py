"""The ratios that the comparison is made for, each with the figure it has to reach."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

Key = tuple[str, int, int]  # line, batch, concurrency
Medians = Mapping[Key, Mapping[str, float]]
Place = tuple[int, int]  # batch, concurrency
RATE, P50, PER_CPU = "requests_per_second", "p50_us", "requests_per_cpu_second"

OURS, OURS_2, OURS_JSON = ("ours",), ("ours, 2 workers",), ("ours json",)
OURS_ANY = (*OURS, *OURS_2)
FLOOR, NAIVE = ("floor",), ("naive FastAPI",)
MOSEC, MOSEC_ALONE = ("mosec",), ("mosec, no batching",)
FULL = ("Triton, full", "mosec, full", "floor, full, batching")
FULL_2 = ("floor, full, batching, 2 workers",)
PYTHON_SERVERS = (
    "LitServe",
    "LitServe, batching",
    "BentoML",
    "MLServer",
    "MLServer v2 base64",
    "MLServer, batching",
)


@dataclass(frozen=True)
class Wanted:
    """The best of some lines over the best of others; of several places the worst decides."""

    name: str
    ours: Sequence[str]
    theirs: Sequence[str]
    places: Sequence[Place]
    metric: str = RATE
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Ratio:
    name: str
    value: float | None  # None: something that it needs was not measured
    at_least: float | None = None
    at_most: float | None = None
    against: str = ""  # the line and place that decided

    @property
    def reached(self) -> bool | None:
        """None: it cannot be told, or nothing is asked."""
        if self.value is None or (self.at_least is None and self.at_most is None):
            return None
        enough = self.at_least is None or self.value >= self.at_least
        return enough and (self.at_most is None or self.value <= self.at_most)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"reached": self.reached}


C16 = [(1, 16), (32, 16)]
EVERYWHERE = [(batch, concurrency) for batch in (1, 32) for concurrency in (1, 16)]

WANTED = (
    Wanted("p50, ours / floor, batch 1, c 1", OURS, FLOOR, [(1, 1)], P50, at_most=1.35),
    Wanted("requests/s, ours / floor, batch 1, c 16", OURS, FLOOR, [(1, 16)], at_least=0.9),
    Wanted("JSON, ours / naive FastAPI, batch 1, c 16", OURS_JSON, NAIVE, [(1, 16)], at_least=2.5),
    Wanted(
        "JSON, ours / naive FastAPI, batch 32, c 16", OURS_JSON, NAIVE, [(32, 16)], at_least=2.5
    ),
    Wanted(
        "sparse ours, 1 or 2 workers / best full softmax that batches, batch 1, c 16",
        OURS + OURS_2,
        FULL,
        [(1, 16)],
        at_least=3,
    ),
    Wanted(
        "sparse ours, 1 or 2 workers / best full softmax that batches, batch 32, c 16",
        OURS + OURS_2,
        FULL,
        [(32, 16)],
        at_least=10,
    ),
    Wanted("the same, 1 worker each, batch 1, c 16", OURS, FULL, [(1, 16)]),
    Wanted("the same, 1 worker each, batch 32, c 16", OURS, FULL, [(32, 16)]),
    Wanted("the same, 2 workers each, batch 1, c 16", OURS_2, FULL_2, [(1, 16)]),
    Wanted("the same, 2 workers each, batch 32, c 16", OURS_2, FULL_2, [(32, 16)]),
    *(
        Wanted(
            f"ours, {workers} / best of LitServe, BentoML and MLServer, batch {batch}, c {at_once}",
            lines,
            PYTHON_SERVERS,
            [(batch, at_once)],
            at_least=5,
        )
        for workers, lines in (("1 worker", OURS), ("1 or 2 workers", OURS_ANY))
        for batch, at_once in EVERYWHERE
    ),
    Wanted("ours / mosec, batch 1, c 16", OURS, MOSEC, [(1, 16)], at_least=1),
    Wanted("ours / mosec, batch 32, c 16", OURS, MOSEC, [(32, 16)], at_least=1),
    Wanted("ours / mosec, batch 1, c 1", OURS, MOSEC, [(1, 1)], at_least=5),
    Wanted("ours / mosec, batch 32, c 1", OURS, MOSEC, [(32, 1)], at_least=5),
    Wanted("ours / mosec without batching, batch 1, c 1", OURS, MOSEC_ALONE, [(1, 1)]),
    Wanted("ours / mosec without batching, batch 1, c 16", OURS, MOSEC_ALONE, [(1, 16)]),
    Wanted("2 workers / 1 worker, c 16, the lowest", OURS_2, OURS, C16),
    Wanted("2 workers / 1 worker, c 16, per CPU second", OURS_2, OURS, C16, PER_CPU),
)


def medians(points: Iterable[Mapping[str, Any]]) -> dict[Key, dict[str, float]]:
    """Over the rounds, of every number; a point with errors does not count."""
    groups: dict[Key, list[Mapping[str, Any]]] = {}
    for point in points:
        if not point["errors"]:
            key = (point["line"], point["batch"], point["concurrency"])
            groups.setdefault(key, []).append(point)
    return {key: _median_of_each(group) for key, group in groups.items()}


def _median_of_each(group: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    numbers = [
        name for name in group[0] if all(isinstance(point[name], int | float) for point in group)
    ]
    return {name: median(point[name] for point in group) for name in numbers}


def ratios(found: Medians, cores: int, memory: Mapping[str, float] | None) -> list[Ratio]:
    weights = memory or {}
    return [
        *(_ratio(found, wanted) for wanted in WANTED),
        _scaling(found, cores),
        Ratio(
            "resident memory above a worker without models / bundle",
            weights.get("above_no_model_per_bundle_byte"),
            at_most=1.3,
        ),
        Ratio(
            "resident memory above a worker with a tiny model / bundle",
            weights.get("above_small_model_per_bundle_byte"),
        ),
    ]


def _ratio(found: Medians, wanted: Wanted) -> Ratio:
    """Without a value if a place is missing: the worst could be there."""
    lower_is_better = wanted.metric == P50
    values = []
    for place in wanted.places:
        ours = _best(found, wanted.ours, place, wanted.metric)
        theirs = _best(found, wanted.theirs, place, wanted.metric)
        if ours is None or theirs is None:
            return Ratio(wanted.name, None, wanted.at_least, wanted.at_most)
        against = f"{theirs[1]}, batch {place[0]}, c {place[1]}"
        values.append((ours[0] / theirs[0], against))
    value, against = max(values) if lower_is_better else min(values)
    return Ratio(wanted.name, value, wanted.at_least, wanted.at_most, against)


def _best(
    found: Medians, lines: Sequence[str], place: Place, metric: str
) -> tuple[float, str] | None:
    """The best of the lines that were measured there, and its name."""
    keys = [key for line in lines if metric in found.get(key := (line, *place), {})]
    values = [(found[key][metric], key[0]) for key in keys]
    return (min if metric == P50 else max)(values, default=None)


def _scaling(found: Medians, cores: int) -> Ratio:
    """One worker has a core beside wrk's; two share what wrk leaves, scaled to all of it."""
    name = "2 workers / 1 worker, c 16, the lowest, wrk's own time given back"
    values = []
    for place in C16:
        alone, both = found.get((*OURS, *place)), found.get((*OURS_2, *place))
        if alone is None or both is None:
            return Ratio(name, None, at_least=1.7)
        left = cores - both["wrk_cpu_seconds"] / both["seconds"]
        against = f"{OURS[0]}, batch {place[0]}, c {place[1]}"
        values.append((both[RATE] / alone[RATE] * cores / left, against))
    value, against = min(values)
    return Ratio(name, value, at_least=1.7, against=against)
