"""How many experts, and how large a budget? Layers over a grid of both, on the Penn Treebank.

Wants the folder of a language-model task that has its hidden vectors, and keeps its layers there:
what is finished is not trained again. Every layer learns briefly from a part of the rows, so that
the grid takes under an hour of a core; figures are of validation words.

    dss task language-model --data PTB --encoder ptb-encoder.npz --out runs/ptb --until hidden
    python -m benchmarks.training.choosing runs/ptb
    python -m benchmarks.training.choosing --render      draws and fills in what was measured before
"""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.document import write_part
from benchmarks.engines.timing import Rows, Times, Turn, call_times, in_turns, one_thread, summary
from benchmarks.training.choosing_report import draw, markdown
from service.bundle import read
from service.engine import Engine
from service.errors import DSSError
from service.system.machine import machine
from trainer.data.arrays import open_head
from trainer.data.files import write_json
from trainer.tasks.language_model import hidden_states, tables
from trainer.tasks.language_model.plan import PlannedLayer
from trainer.training.problem import BudgetImpossible

RESULTS = Path("benchmarks/results/choosing.json")
IMAGE = Path("docs/images/choosing.svg")
DOCUMENT = Path("docs/choosing.md")
K, ROUNDS, CALLS, WARM_UP = 10, 9, 300, 20

Grid = Mapping[int, Sequence[float]]  # speedups to ask for, by number of experts
KEEP_ONE: Grid = {
    8: (6, 8),
    16: (9, 12, 16),
    32: (10, 22, 30),
    64: (24, 34, 45),
    128: (24, 34, 45),
    256: (24, 30),
}
DROPPING: Grid = {16: (20, 30), 64: (50, 65, 90), 256: (28, 32)}
BRIEF = {"train_rows": 200_000, "epochs": 2, "sample_rows": 100_000}


def plan(grid: Grid, *, keep_one: bool) -> dict[str, PlannedLayer]:
    return {
        f"choosing-{n_experts}-{speedup:g}{'' if keep_one else '-dropping'}": PlannedLayer(
            title=f"K={n_experts}, {speedup:g}x",
            settings={"n_experts": n_experts, "speedup": speedup, "keep_one": keep_one, **BRIEF},
        )
        for n_experts, speedups in grid.items()
        for speedup in speedups
    }


def learn(folder: Path, name: str, planned: PlannedLayer, threads: int) -> dict[str, Any]:
    """Train and export one layer of the grid; without figures if there is no such layer."""
    files = folder / hidden_states.FOLDER
    head = open_head(files / hidden_states.HEAD)
    training, valid = (tables.vectors_of(files, split, head) for split in ("train", "valid"))
    asked = {key: planned.settings[key] for key in ("n_experts", "speedup", "keep_one")}
    try:
        learned = tables.train_layer(folder, name, planned, training, valid, head, threads)
    except BudgetImpossible as impossible:
        click.echo(f"{planned.title:<14} {impossible}")
        return {**asked, "impossible": str(impossible)}
    tables.export_layer(folder, name, planned)
    click.echo(tables.line(planned, learned))
    figures = ("accuracy_at", "full_accuracy_at", "flops_speedup", "mean_rows", "mean_copies")
    return {**asked, **{figure: learned[figure] for figure in figures}}


def microseconds(folder: Path, names: Sequence[str]) -> dict[str, float]:
    """Of a single row's answer, one thread, all layers in turns."""
    rows = np.load(hidden_states.rows_file(folder / hidden_states.FOLDER, "valid"), mmap_mode="r")
    some = np.asarray(rows[:: max(1, len(rows) // 2000)], np.float32)

    def turn(name: str) -> Turn:
        engine = Engine(read(folder / tables.BUNDLES / name / "1"), threads=1)
        rng = np.random.default_rng(0)

        def call(row: Rows) -> object:
            return engine.topk(row, K)

        def calls() -> Times:
            chosen = rng.integers(len(some), size=WARM_UP + CALLS)
            return call_times(call, [some[number : number + 1] for number in chosen], WARM_UP)

        return calls

    with one_thread():
        times = in_turns([turn(name) for name in names], ROUNDS)
    return {name: summary(each)["mean_us"] for name, each in zip(names, times, strict=True)}


def run(folder: Path, threads: int) -> dict[str, Any]:
    layers = plan(KEEP_ONE, keep_one=True) | plan(DROPPING, keep_one=False)
    points = {name: learn(folder, name, planned, threads) for name, planned in layers.items()}
    there = [name for name, point in points.items() if "impossible" not in point]
    for name, value in microseconds(folder, there).items():
        points[name]["microseconds"] = value
    return {
        "command": shlex.join(["python", "-m", "benchmarks.training.choosing", *sys.argv[1:]]),
        "machine": machine("numba", "numpy", "torch"),
        "settings": BRIEF,
        "encoder": json.loads((folder / hidden_states.FIGURES).read_text()),
        "points": list(points.values()),
    }


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--threads", type=int, default=1, show_default=True, help="To train with.")
@click.option("--render", is_flag=True, help="Only draw and fill in what was measured before.")
def main(folder: Path | None, threads: int, render: bool) -> None:
    """Train a grid of layers, draw it, and fill in the document."""
    if render == (folder is not None):
        raise click.UsageError("Give either the folder of a language-model task or --render.")
    try:
        if folder is not None:
            write_json(RESULTS, run(folder, threads))
        results = json.loads(RESULTS.read_text())
        draw(results, IMAGE)
        write_part(DOCUMENT, "choosing", markdown(results, os.path.relpath(IMAGE, DOCUMENT.parent)))
    except DSSError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
