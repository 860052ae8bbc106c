"""Queries a second against recall, as ann-benchmarks draws them, on a head's held-out rows.

This engine at every setting of its dials, full scans, SVD-softmax, FAISS, ScaNN, hnswlib and
usearch, each swept over its own. Recall is the share of the head's true top 1, 10 and 100. One row
a call, one thread; all take turns for several rounds. Results go to benchmarks/results/curves.json,
one entry for each --title.

    python -m benchmarks.engines.curves --title "Penn Treebank" --capture captured/ptb \
        --bundle models/ptb/1 --document docs/performance.md

M rows, D hidden, N classes, k answers.
"""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.document import write_part
from benchmarks.engines import contestants, curve_report, dials, quantised_lists
from benchmarks.engines.__main__ import IMAGES, QUICK, RESULTS, installed, keep, slug
from benchmarks.engines.contestants import OURS, Classes, Contestant
from benchmarks.engines.graph_indexes import GRAPHS, graphs
from benchmarks.engines.measure import names_of
from benchmarks.engines.our_dials import our_dials
from benchmarks.engines.timing import Rows, Times, call_times, in_turns, one_thread, summary
from service import bundle as bundles
from service.errors import DSSError
from service.system.machine import machine
from trainer.baselines.measurement import spread
from trainer.baselines.method import PackageMissing
from trainer.capture.folder import Captured, read_capture
from trainer.data.arrays import Head, chunks, open_head, open_vectors
from trainer.evaluation.full_scan import full_topk, rows_at_once

KS = (1, 10, 100)
WARM_UP = 5


class RowsMissing(DSSError):
    pass


@dataclass(frozen=True)
class Effort:
    rounds: int
    microseconds: float  # of calls in a round, about
    fewest_calls: int = 5
    most_calls: int = 500


THOROUGH = Effort(rounds=7, microseconds=30_000)
HASTY = Effort(rounds=2, microseconds=2_000)


# --- the head and its rows ---------------------------------------------------------------------


@dataclass(frozen=True)
class Queries:
    head: Head
    hidden: Rows  # [M,D]
    best: NDArray[np.int64]  # [M,100] the head's own answers, or as many as it has classes
    wide_head: Head  # the same for libraries that know no bias: it is another column
    wide: Rows  # [M,D+...]

    @property
    def ks(self) -> list[int]:
        return [k for k in KS if k <= self.best.shape[1]]


def read_queries(captured: Captured, rows: int) -> Queries:
    """Held-out rows of a capture, evenly spread: of the test split, else of the validation."""
    hidden, labels = captured.test_hidden, captured.test_labels
    if hidden is None or labels is None:
        hidden, labels = captured.valid_hidden, captured.valid_labels
    if hidden is None or labels is None:
        raise RowsMissing(f"{captured.folder} has no held-out rows; capture it with valid=.")
    head = open_head(captured.head, captured.bias)
    vectors = open_vectors(
        hidden, labels, n_classes=captured.n_classes, hidden_size=captured.hidden_size
    )
    places = spread(len(vectors.labels), rows)
    return queries(head, np.ascontiguousarray(vectors.hidden[places], np.float32))


def queries(head: Head, hidden: Rows) -> Queries:
    best = full_topk(hidden, head, min(KS[-1], len(head.weight)))
    return Queries(head, hidden, best, *widened(head, hidden))


def widened(head: Head, hidden: Rows) -> tuple[Head, Rows]:
    """The bias as a column, and zeros up to an even width, which short codes need."""
    columns, ones = [head.weight], [hidden]
    if head.bias is not None:
        # As large as the hidden vectors' numbers are, so that codes of them lose little.
        largest = np.float32(max(np.abs(hidden).max(), np.finfo(np.float32).tiny))
        columns.append((head.bias / largest)[:, None])
        ones.append(np.full((len(hidden), 1), largest, np.float32))
    if sum(part.shape[1] for part in columns) % 2:
        columns.append(np.zeros((len(head.weight), 1), np.float32))
        ones.append(np.zeros((len(hidden), 1), np.float32))
    weight, rows = (
        np.ascontiguousarray(np.concatenate(parts, axis=1)) for parts in (columns, ones)
    )
    return Head(weight, None), rows


# --- who takes part ----------------------------------------------------------------------------


def gather(
    data: Queries, quick: bool, say: Callable[[str], None]
) -> tuple[list[Contestant], list[dict[str, str]]]:
    """All but ours, and those that are not installed."""
    head, ks = data.wide_head, data.ks
    n_classes, width = head.weight.shape
    made_from = contestants.inputs(head, data.wide)
    codes = partial(dials.codes, n_classes)
    builders: dict[str, Callable[[], Iterator[Contestant]]] = {
        "full scans": lambda: _full_scans(data),
        "SVD-softmax": lambda: contestants.svd(made_from, quick, ks, lambda _: dials.svd(width)),
        "FAISS IVF-Flat": lambda: contestants.faiss_ivf(
            made_from, quick, ks, lambda _: dials.ivf(n_classes)
        ),
        "FAISS IVF-PQ FastScan": lambda: quantised_lists.product_codes(head, quick, ks, codes),
        "FAISS IVF-RaBitQ": lambda: quantised_lists.rabitq(head, quick, ks, codes),
        "ScaNN": lambda: contestants.scann(made_from, quick, ks, partial(dials.scann, n_classes)),
        **{kind.library: partial(graphs, kind, head, quick, ks) for kind in GRAPHS},
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


def _full_scans(data: Queries) -> Iterator[Contestant]:
    for k in data.ks:
        for scan in contestants.full_scans(data.wide_head, data.wide, k):
            if scan.name.startswith("ONNX Runtime"):
                yield scan


# --- measuring ---------------------------------------------------------------------------------


def recall_of(contestant: Contestant, data: Queries) -> float:
    """The share of the head's own k best that are among its k answers."""
    contestant.prepare()
    rows = rows_of(contestant, data)
    found = 0
    for part in chunks(len(rows), min(256, rows_at_once(len(data.head.weight)))):
        found += shared(contestant.answers(rows[part]), data.best[part, : contestant.k])
    return found / (len(rows) * contestant.k)


def shared(answers: Classes, best: NDArray[np.int64]) -> int:
    """How many of best [M,k] are among answers [M,k]; an answer given twice counts once."""
    found = np.sort(answers, axis=1)
    found[:, 1:][found[:, 1:] == found[:, :-1]] = -1
    both = np.sort(np.concatenate([found, best], axis=1), axis=1)
    return int(((both[:, 1:] == both[:, :-1]) & (both[:, 1:] >= 0)).sum())


def rows_of(contestant: Contestant, data: Queries) -> Rows:
    return data.hidden if contestant.kind == OURS else data.wide


def turn(contestant: Contestant, rows: Rows, effort: Effort) -> Callable[[], Times]:
    """So many calls that a round takes about as long for everybody."""
    rng = np.random.default_rng(1)
    contestant.prepare()
    first = call_times(contestant.one, [rows[:1]] * 4, 2)
    wanted = round(effort.microseconds / float(first.min()))
    calls = min(effort.most_calls, max(effort.fewest_calls, wanted))

    def timed() -> Times:
        contestant.prepare()
        chosen = rng.integers(len(rows), size=WARM_UP + calls)
        return call_times(contestant.one, [rows[row : row + 1] for row in chosen], WARM_UP)

    return timed


def measure(
    data: Queries,
    given: Sequence[tuple[str, bundles.Bundle]],
    effort: Effort,
    quick: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    others, absent = gather(data, quick, say)
    mine = [each for name, bundle in given for each in our_dials(name, bundle, data.ks)]
    field = [*mine, *others]
    say(f"answers of {len(field)} settings")
    with one_thread():
        recalls = [recall_of(each, data) for each in field]
        say("single rows")
        turns = [turn(each, rows_of(each, data), effort) for each in field]
        times = in_turns(turns, effort.rounds)
    points = [
        {
            "name": each.name,
            "method": each.method,
            "kind": each.kind,
            "k": each.k,
            "dial": dict(each.dial),
            "build_seconds": each.build_seconds,
            **each.facts,
            "recall": round(recall, 6),
            **_figures(rounds),
        }
        for each, recall, rounds in zip(field, recalls, times, strict=True)
    ]
    return {"absent": absent, "points": points}


def _figures(rounds: Sequence[Times]) -> dict[str, Any]:
    found = summary(rounds)
    return {"queries_per_second": round(1e6 / found["mean_us"], 1), **found}


def run(
    paths: Sequence[Path],
    data: Queries,
    *,
    effort: Effort,
    quick: bool,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    given = [
        (name, bundles.read(path, head=True))
        for name, path in zip(names_of(paths), paths, strict=True)
    ]
    n_classes, hidden_size = data.head.weight.shape
    return {
        "command": shlex.join(["python", "-m", "benchmarks.engines.curves", *sys.argv[1:]]),
        "quick": quick,
        "machine": machine(*installed()),
        "n_classes": n_classes,
        "hidden_size": hidden_size,
        "rows": len(data.hidden),
        "rounds": effort.rounds,
        **measure(data, given, effort, quick, say),
    }


# --- the command -------------------------------------------------------------------------------

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
PATH = click.Path(path_type=Path)


@click.command()
@click.option("--capture", type=FOLDER, help="Folder with a head and held-out rows.")
@click.option("--bundle", "paths", multiple=True, type=FOLDER)
@click.option("--title", default="curves", show_default=True, help="The entry of the results.")
@click.option("--rows", default=2000, show_default=True, help="Held-out rows that are asked.")
@click.option("--rounds", type=int, help="In which all take turns.")
@click.option("--quick", is_flag=True, help="Few settings and rounds; results go to runs/quick.")
@click.option("--out", type=PATH, help="Results of all titles, as JSON.")
@click.option("--images", type=PATH, help="Folder of the pictures.")
@click.option(
    "--document",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Markdown with curves markers to fill.",
)
@click.option("--render", is_flag=True, help="Only draw and fill in what was measured before.")
def main(
    capture: Path | None,
    paths: tuple[Path, ...],
    title: str,
    rows: int,
    rounds: int | None,
    quick: bool,
    out: Path | None,
    images: Path | None,
    document: Path | None,
    render: bool,
) -> None:
    """Draw queries a second against recall for this engine and all others."""
    out = out or (QUICK if quick else RESULTS) / "curves.json"
    images = images or (QUICK if quick else IMAGES)
    effort = HASTY if quick else THOROUGH
    if rounds is not None:
        effort = replace(effort, rounds=rounds)
    try:
        if not render:
            if capture is None:
                raise click.UsageError("--capture is needed.")
            data = read_queries(read_capture(capture), rows)
            found = run(paths, data, effort=effort, quick=quick, say=click.echo)
            keep(out, title, found)
            click.echo(curve_report.ratio_table(found))
        fill(json.loads(out.read_text()), images, document)
    except DSSError as error:
        raise click.ClickException(str(error)) from error


def fill(runs: dict[str, dict[str, Any]], images: Path, document: Path | None) -> None:
    """A picture of every run, and the document's part with all of them."""
    places = {title: images / f"curves-{slug(title)}.svg" for title in runs}
    for title, found in runs.items():
        curve_report.draw(found, places[title])
    if document is not None:
        seen = {title: os.path.relpath(place, document.parent) for title, place in places.items()}
        write_part(document, "curves", curve_report.markdown(runs, seen))


if __name__ == "__main__":
    main()
