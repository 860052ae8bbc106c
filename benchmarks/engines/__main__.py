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

from benchmarks.document import write_part
from benchmarks.engines import report
from benchmarks.engines.contestants import K
from benchmarks.engines.data import Data, read_data, served
from benchmarks.engines.measure import HASTY, THOROUGH, Effort, large_experts, measure, names_of
from benchmarks.engines.random_bundles import Shape
from benchmarks.engines.ratios import ratios
from service import bundle as bundles
from service.bundle.manifest import RECALL_AT
from service.errors import DSSError
from service.system.machine import machine
from trainer.data.files import write_json

RESULTS, IMAGES = Path("benchmarks/results"), Path("docs/images")
QUICK = Path("runs/quick")  # never committed
PACKAGES = ("onnxruntime", "numba", "numpy", "torch", "faiss-cpu", "hnswlib", "scann", "usearch")
LARGE_EXPERTS = Shape(n_classes=33_278, n_experts=64, held=1_331, hidden_size=200)


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
        write_part(document, "engines", report.markdown(runs, seen))


if __name__ == "__main__":
    main()
