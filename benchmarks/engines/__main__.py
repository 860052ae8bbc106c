"""This engine against full scans, SVD-softmax, FAISS, hnswlib, ScaNN and usearch, in one run.

All answer the same rows from the same head, top 10, one thread; they take turns for several rounds.
The results go to benchmarks/results/engines.json, one entry for each --title, and from there into
the tables of a document.

    python -m benchmarks.engines --title "Penn Treebank" --bundle runs/lm-ptb/bundles/ds-64/1 \
        --hidden runs/lm-ptb/hidden/test.npy --labels runs/lm-ptb/hidden/test.labels.npy \
        --head runs/lm-ptb/hidden/head.npy --document docs/performance.md
"""

import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

<<<<<<< HEAD
from benchmarks.engines import report
from benchmarks.engines.contestants import K
from benchmarks.engines.measure import (
    HASTY,
    THOROUGH,
    Data,
    Effort,
    large_experts,
    measure,
    names_of,
    read_data,
    served,
)
from benchmarks.engines.random_bundles import Shape
from benchmarks.engines.ratios import ratios
from service import bundle as bundles
from service.bundle.manifest import RECALL_AT
from service.errors import DSSError
from service.system.machine import machine
from trainer.data.files import write_json
=======
from benchmarks.engines import contestants, report
from benchmarks.engines.contestants import OURS, Contestant, K
from benchmarks.engines.data import Data, Served, read_data, served
from benchmarks.engines.graph_indexes import GRAPHS, graphs
from benchmarks.engines.random_bundles import Shape, random_rows, write_random
from benchmarks.engines.ratios import microseconds, ratios
from benchmarks.engines.timing import Rows, Times, call_times, in_turns, one_thread, summary
from service import bundle as bundles
from service.bundle import Precision
from service.bundle.manifest import RECALL_AT
from service.errors import DSSError
from service.system.machine import machine
from trainer.baselines.method import PackageMissing
from trainer.data.arrays import chunks
from trainer.data.files import write_json
from trainer.evaluation.full_scan import rows_at_once
>>>>>>> 8af6c4346de537ced59a0987f5ecc9ae76732696

RESULTS, IMAGES = Path("benchmarks/results"), Path("docs/images")
QUICK = Path("runs/quick")  # never committed
PACKAGES = ("onnxruntime", "numba", "numpy", "torch", "faiss-cpu", "hnswlib", "scann", "usearch")
LARGE_EXPERTS = Shape(n_classes=33_278, n_experts=64, held=1_331, hidden_size=200)
<<<<<<< HEAD
=======
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
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


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
>>>>>>> 8af6c4346de537ced59a0987f5ecc9ae76732696


def installed() -> list[str]:
    found = []
    for package in PACKAGES:
        try:
            version(package)
        except PackageNotFoundError:
            continue
        found.append(package)
    return found


def run(
    paths: Sequence[Path],
    data: Data,
    *,
    effort: Effort,
    quick: bool,
    large: Shape,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """All that is measured of one head."""
    given = [
        served(name, bundles.read(path), data.hidden)
        for name, path in zip(names_of(paths), paths, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        say("writing large experts")
        filled = large_experts(Path(folder), large, len(data.hidden))
        measured = measure(data, given, filled, effort, quick, say)
    n_classes, hidden_size = data.head.weight.shape
    hits = data.best == data.labels[:, None]
    found = {
        "command": command(),
        "quick": quick,
        "machine": machine(*installed()),
        "n_classes": n_classes,
        "hidden_size": hidden_size,
        "rows": len(data.labels),
        "k": K,
        "rounds": effort.rounds,
        "calls_in_a_round": effort.calls,
        "batch": effort.batch,
        "full_accuracy": {str(k): round(float(hits[:, :k].any(1).mean()), 6) for k in RECALL_AT},
        **measured,
    }
    return {**found, "ratios": ratios(found)}


def command() -> str:
    return shlex.join(["python", "-m", "benchmarks.engines", *sys.argv[1:]])


def slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def picture(images: Path, title: str) -> Path:
    return images / f"engines-{slug(title)}.svg"


FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.option("--bundle", "paths", multiple=True, type=FOLDER)
@click.option("--hidden", type=FILE, help="Rows to answer, [M,D].")
@click.option("--labels", type=FILE)
@click.option("--head", type=FILE, help="The full softmax, [N,D], without bias.")
@click.option("--title", default="engines", show_default=True, help="The entry of the results.")
@click.option("--rows", default=2000, show_default=True, help="For accuracy and precision.")
@click.option("--rounds", type=int, help="In which all take turns.")
@click.option("--quick", is_flag=True, help="Few settings and rounds; results go to runs/quick.")
@click.option("--out", type=click.Path(path_type=Path), help="Results of all titles, as JSON.")
@click.option("--images", type=click.Path(path_type=Path), help="Folder of the pictures.")
@click.option("--document", type=FILE, help="Markdown with engines markers to fill.")
@click.option("--render", is_flag=True, help="Only draw and fill in what was measured before.")
def main(
    paths: tuple[Path, ...],
    hidden: Path | None,
    labels: Path | None,
    head: Path | None,
    title: str,
    rows: int,
    rounds: int | None,
    quick: bool,
    out: Path | None,
    images: Path | None,
    document: Path | None,
    render: bool,
) -> None:
    """Time this engine beside all others on your vectors."""
    out = out or (QUICK if quick else RESULTS) / "engines.json"
    images = images or (QUICK if quick else IMAGES)
    effort = HASTY if quick else THOROUGH
    if rounds is not None:
        effort = replace(effort, rounds=rounds)
    try:
        if not render:
            if not paths or hidden is None or labels is None or head is None:
                raise click.UsageError("--bundle, --hidden, --labels and --head are needed.")
            data = read_data(hidden, labels, head, rows)
            found = run(
                paths, data, effort=effort, quick=quick, large=LARGE_EXPERTS, say=click.echo
            )
            keep(out, title, found)
            click.echo(report.lines(found))
            click.echo(report.ratio_table(found))
            click.echo(report.floor_table(found))
        fill(json.loads(out.read_text()), images, document)
    except DSSError as error:
        raise click.ClickException(str(error)) from error


def keep(out: Path, title: str, found: dict[str, Any]) -> None:
    """Beside the entries of other titles."""
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(out.read_text()) if out.exists() else {}
    write_json(out, {**kept, title: found})


def fill(runs: dict[str, dict[str, Any]], images: Path, document: Path | None) -> None:
    """A picture of every run, and the document's part with all of them."""
    for title, found in runs.items():
        report.draw(found, picture(images, title))
    if document is not None:
        seen = {title: os.path.relpath(picture(images, title), document.parent) for title in runs}
        report.write_part(document, "engines", report.markdown(runs, seen))


if __name__ == "__main__":
    main()
