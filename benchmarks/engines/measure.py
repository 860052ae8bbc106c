"""What takes part in the comparison of engines, and its answers and times.

M rows, B rows of a call, D hidden, K experts, N classes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.engines import contestants
from benchmarks.engines.contestants import OURS, Contestant
from benchmarks.engines.data import Data, Served, served
from benchmarks.engines.graph_indexes import GRAPHS, graphs
from benchmarks.engines.random_bundles import Shape, random_rows, write_random
from benchmarks.engines.ratios import microseconds
from benchmarks.engines.timing import Rows, Times, call_times, in_turns, one_thread, summary
from service.bundle import Precision
from service.bundle.manifest import RECALL_AT
from trainer.baselines.method import PackageMissing
from trainer.data.arrays import chunks
from trainer.evaluation.full_scan import rows_at_once

LARGE_PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
WARM_UP = 20


@dataclass(frozen=True)
class Effort:
    rounds: int
    calls: int  # of one row, in a round
    batches: int  # in a round
    batch: int = 256


THOROUGH = Effort(rounds=11, calls=300, batches=4)
HASTY = Effort(rounds=2, calls=30, batches=1)


# --- what takes part ---------------------------------------------------------------------------


def large_experts(folder: Path, shape: Shape, n_rows: int) -> list[Served]:
    """Random numbers in experts of a size at which bytes count more than calls do."""
    rows = random_rows(n_rows, shape.hidden_size, seed=9)
    return [
        served(
            f"random, {shape.held:,} classes in an expert, {precision}",
            write_random(folder / precision, shape, precision=precision),
            rows,
        )
        for precision in LARGE_PRECISIONS
    ]


def names_of(paths: Sequence[Path]) -> list[str]:
    """Of models/<name>/<version> the name, if that tells them apart."""
    names = [path.parent.name if path.name.isdigit() else path.name for path in paths]
    with_versions = [f"{path.parent.name}/{path.name}" for path in paths]
    for chosen in (names, with_versions):
        if len(set(chosen)) == len(chosen):
            return chosen
    return [str(path) for path in paths]


def gather(
    data: Data, quick: bool, say: Callable[[str], None]
) -> tuple[list[Contestant], list[dict[str, str]]]:
    """All but ours, and those that are not installed."""
    made_from = contestants.inputs(data.head, data.hidden)
    builders: dict[str, Callable[[], Iterator[Contestant]]] = {
        "full scans": lambda: contestants.full_scans(data.head, data.hidden),
        "SVD-softmax": lambda: contestants.svd(made_from, quick),
        "FAISS IVF-Flat": lambda: contestants.faiss_ivf(made_from, quick),
        "ScaNN": lambda: contestants.scann(made_from, quick),
        **{kind.library: partial(graphs, kind, data.head, quick) for kind in GRAPHS},
    }
    found: list[Contestant] = []
    absent: list[dict[str, str]] = []
    for method, build in builders.items():
        say(f"building {method}")
        try:
            found += build()
        except PackageMissing as missing:
            absent.append({"method": method, "reason": str(missing)})
    return found, absent


# --- measuring ---------------------------------------------------------------------------------


def answer_figures(contestant: Contestant, data: Data) -> dict[str, dict[str, float]]:
    """Label accuracy, and precision against the full softmax's own answers."""
    contestant.prepare()
    parts = [
        contestant.answers(data.hidden[part])
        for part in chunks(len(data.hidden), rows_at_once(len(data.head.weight)))
    ]
    return compared(np.concatenate(parts), data.labels, data.best)


def compared(
    answers: NDArray[np.integer[Any]], labels: NDArray[np.int64], best: NDArray[np.int64]
) -> dict[str, dict[str, float]]:
    """Of answers [M,10] beside labels [M] and the best [M,10]."""
    hits = answers == labels[:, None]
    return {
        "accuracy": {str(k): round(float(hits[:, :k].any(1).mean()), 6) for k in RECALL_AT},
        "precision": {
            str(k): round(
                float((answers[:, :k, None] == best[:, None, :k]).any(1).mean()),
                6,
            )
            for k in RECALL_AT
        },
    }


class Turns:
    """Rounds of a contestant: of single rows, or of batches."""

    def __init__(self, effort: Effort) -> None:
        self.effort = effort

    def one(self, contestant: Contestant, hidden: Rows) -> Callable[[], Times]:
        rng = np.random.default_rng(1)

        def turn() -> Times:
            contestant.prepare()
            rows = rng.integers(len(hidden), size=WARM_UP + self.effort.calls)
            singles = [hidden[row : row + 1] for row in rows]
            return call_times(contestant.one, singles, WARM_UP)

        return turn

    def many(self, contestant: Contestant, hidden: Rows) -> Callable[[], Times]:
        rng = np.random.default_rng(2)

        def turn() -> Times:
            contestant.prepare()
            shape = (1 + self.effort.batches, self.effort.batch)
            rows = rng.integers(len(hidden), size=shape)
            return call_times(contestant.many, [hidden[each] for each in rows], 1)

        return turn


def measure(
    data: Data,
    given: Sequence[Served],
    large: Sequence[Served],
    effort: Effort,
    quick: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Everybody in turns. `large` are only timed: their numbers are random."""
    others, absent = gather(data, quick, say)
    mine = [(of, each) for of in given for each in contestants.ours(of.name, of.bundle, of.facts)]
    only_timed = [
        (of, each)
        for of in large
        for each in contestants.ours(of.name, of.bundle, of.facts)
        if each.dial["experts"] == 1
    ]
    field = [*(each for _, each in mine), *others]
    say(f"answers of {len(field)} contestants")
    with one_thread():
        figures = [answer_figures(each, data) for each in field]
        say("single rows")
        turns = Turns(effort)
        timed = [(each, data.hidden) for each in field]
        timed += [(each, of.hidden) for of, each in only_timed]
        singles = in_turns(
            [turns.one(each, hidden) for each, hidden in timed]
            + [of.floor.turn(of.experts, seed=3) for of in [*given, *large]],
            effort.rounds,
        )
        say("batches")
        batches = in_turns([turns.many(each, hidden) for each, hidden in timed], effort.rounds)
    floors = {
        of.name: of.floor.figures(of.experts, rounds)
        for of, rounds in zip([*given, *large], singles[len(timed) :], strict=True)
    }
    points = [
        {
            "name": each.name,
            "method": each.method,
            "kind": each.kind,
            "dial": dict(each.dial),
            "build_seconds": each.build_seconds,
            **each.facts,
            "one": summary(single),
            "many": summary(batch, effort.batch),
        }
        for (each, _), single, batch in zip(timed, singles, batches, strict=False)
    ]
    for point in points:
        if point["kind"] == OURS:
            point["floor_us"] = floors[point["bundle"]]["floor_us"]
    with_answers = [{**point, **figure} for point, figure in zip(points, figures, strict=False)]
    return {
        "absent": absent,
        "contestants": with_answers,
        "large_experts": points[len(field) :],
        "floors": [_floor(of, floors[of.name], points) for of in [*given, *large]],
    }


def _floor(
    of: Served, figures: dict[str, float], points: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Beside the fastest backend that searches one expert."""
    ours = min(
        (
            point
            for point in points
            if point.get("bundle") == of.name and point["dial"]["experts"] == 1
        ),
        key=microseconds,
    )
    sizes = np.array(of.bundle.manifest.expert_sizes)
    return {
        "bundle": of.name,
        "precision": of.bundle.manifest.precision,
        "classes_per_row": round(float(sizes[of.experts].mean()), 1),
        **figures,
        "ours": ours["name"],
        "ours_us": microseconds(ours),
        "ratio": round(microseconds(ours) / figures["floor_us"], 3),
    }
