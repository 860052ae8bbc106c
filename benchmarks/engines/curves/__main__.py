"""Queries a second against recall, as ann-benchmarks draws them, on a head's held-out rows.

This engine at every setting of its dials, full scans, SVD-softmax, FAISS, ScaNN, hnswlib and
usearch, each swept over its own. Recall is the share of the head's true top 1, 10 and 100. One row
a call, one thread. A first pass leaves out settings that another of the same method clearly beats;
the others take turns for several rounds. Results go to benchmarks/results/curves.json, one entry
for each --title.

    python -m benchmarks.engines.curves --title "Penn Treebank" --capture captured/ptb \
        --bundle models/ptb/1 --document docs/performance.md

M rows, D hidden, N classes, k answers.
"""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np

from benchmarks.document import write_part
from benchmarks.engines import contestants
from benchmarks.engines.__main__ import IMAGES, QUICK, RESULTS, installed, keep, slug
from benchmarks.engines.contestants import Contestant
from benchmarks.engines.curves import dials, quantised_lists, report
from benchmarks.engines.curves.first_pass import Tried, asked, quick_times, shortlist
from benchmarks.engines.curves.our_dials import our_dials
from benchmarks.engines.curves.queries import Queries, read_queries, rows_of
from benchmarks.engines.graph_indexes import GRAPHS, graphs
from benchmarks.engines.measure import names_of
from benchmarks.engines.ratios import REFERENCE
from benchmarks.engines.timing import Times, call_times, in_turns, one_thread, summary
from service import bundle as bundles
from service.errors import DSSError
from service.system.machine import machine
from trainer.baselines.method import PackageMissing
from trainer.capture.folder import read_capture

WARM_UP = 5


@dataclass(frozen=True)
class Effort:
    rounds: int
    microseconds: float  # of calls in a round, about
    fewest_calls: int = 5
    most_calls: int = 500


THOROUGH = Effort(rounds=7, microseconds=30_000)
HASTY = Effort(rounds=2, microseconds=2_000)


# --- who takes part ----------------------------------------------------------------------------


@dataclass
class Field:
    """All but ours: who is worth long turns, how many settings were tried, who is not installed."""

    kept: list[Tried] = field(default_factory=list)
    tried: dict[str, int] = field(default_factory=dict)
    absent: list[dict[str, str]] = field(default_factory=list)


def gather(data: Queries, quick: bool, say: Callable[[str], None]) -> Field:
    head, ks = data.wide_head, data.ks
    n_classes, width = head.weight.shape
    made_from = contestants.inputs(head, data.wide)
    codes = partial(dials.codes, n_classes)
    builders: dict[str, Callable[[], Iterator[Contestant]]] = {
        "SVD-softmax": lambda: contestants.svd(
            made_from, quick, ks, partial(dials.svd, n_classes, width)
        ),
        "FAISS IVF-Flat": lambda: contestants.faiss_ivf(
            made_from, quick, ks, lambda _: dials.ivf(n_classes)
        ),
        "FAISS IVF-PQ FastScan": lambda: quantised_lists.product_codes(head, quick, ks, codes),
        "FAISS IVF-RaBitQ": lambda: quantised_lists.rabitq(head, quick, ks, codes),
        "ScaNN": lambda: contestants.scann(made_from, quick, ks, partial(dials.scann, n_classes)),
        **{kind.library: partial(graphs, kind, head, quick, ks, dials.WIDTHS) for kind in GRAPHS},
    }
    found = Field([asked(*each, data) for each in quick_times(full_scans(data), data)])
    scans = {each.contestant.k: each.microseconds for each in found.kept if is_exact(each)}
    for method, build in builders.items():
        started = perf_counter()
        try:
            settings = list(build())
        except PackageMissing as missing:
            found.absent.append({"method": method, "reason": str(missing)})
            continue
        kept = shortlist(settings, data, scans)
        found.kept += kept
        found.tried[method] = len(settings)
        seconds = perf_counter() - started
        say(f"{method}: {len(kept)} of {len(settings)} settings go on, after {seconds:.0f} s")
    return found


def full_scans(data: Queries) -> Iterator[Contestant]:
    for k in data.ks:
        for scan in contestants.full_scans(data.wide_head, data.wide, k):
            if scan.name.startswith("ONNX Runtime"):
                yield scan


def is_exact(scan: Tried) -> bool:
    return scan.contestant.name == REFERENCE


# --- measuring ---------------------------------------------------------------------------------


def turn(tried: Tried, data: Queries, effort: Effort) -> Callable[[], Times]:
    """So many calls that a round takes about as long for everybody."""
    contestant, rows = tried.contestant, rows_of(tried.contestant, data)
    rng = np.random.default_rng(1)
    wanted = round(effort.microseconds / tried.microseconds)
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
    mine = [each for name, bundle in given for each in our_dials(name, bundle, data.ks)]
    others = gather(data, quick, say)
    kept = [*(asked(*each, data) for each in quick_times(mine, data)), *others.kept]
    say(f"turns of {len(kept)} settings")
    with one_thread():
        turns = [turn(each, data, effort) for each in kept]
        times = in_turns(turns, effort.rounds)
    points = [
        {
            **_setting(each.contestant),
            "recall": round(each.recall(data), 6),
            **_figures(rounds),
        }
        for each, rounds in zip(kept, times, strict=True)
    ]
    return {"absent": others.absent, "tried": others.tried, "points": points}


def _setting(contestant: Contestant) -> dict[str, Any]:
    return {
        "name": contestant.name,
        "method": contestant.method,
        "kind": contestant.kind,
        "k": contestant.k,
        "dial": dict(contestant.dial),
        "build_seconds": contestant.build_seconds,
        **contestant.facts,
    }


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
            click.echo("\n\n".join(report.tables(found)))
        fill(json.loads(out.read_text()), images, document)
    except DSSError as error:
        raise click.ClickException(str(error)) from error


def fill(runs: dict[str, dict[str, Any]], images: Path, document: Path | None) -> None:
    """A picture of every run, and the document's part with all of them."""
    places = {title: images / f"curves-{slug(title)}.svg" for title in runs}
    for title, found in runs.items():
        report.draw(found, places[title])
    if document is not None:
        seen = {title: os.path.relpath(place, document.parent) for title, place in places.items()}
        write_part(document, "curves", report.markdown(runs, seen))


if __name__ == "__main__":
    main()
