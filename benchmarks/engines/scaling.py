"""How the time of an answer grows with the number of classes, experts, hidden size, answers, rows.

Random experts of the right shape: as many of them and as large as a layer that saves about 40 times
the FLOPs. Beside this engine stand full scans of as many classes, and the byte floor; so it also
shows where a full scan wins. One thread.

    python -m benchmarks.engines.scaling --document docs/performance.md

N classes, K experts, V classes of an expert, D hidden, k answers, B rows of a call.
"""

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, isqrt
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.document import write_part
from benchmarks.engines import scaling_report as report
from benchmarks.engines.byte_floor import ByteFloor
from benchmarks.engines.contestants import exact_scans
from benchmarks.engines.random_bundles import Shape, random_rows, write_random
from benchmarks.engines.timing import Rows, Times, call_times, in_turns, one_thread, summary
from service.engine import Engine
from service.errors import DSSError
from service.system.machine import machine
from trainer.data.arrays import Head
from trainer.data.files import write_json

RESULTS = Path("benchmarks/results/scaling.json")
IMAGE = Path("docs/images/scaling.svg")
QUICK = Path("runs/quick")  # never committed
ROWS = 2048  # that calls draw from


@dataclass(frozen=True)
class Setting:
    n_classes: int = 33_278
    n_experts: int = 64
    hidden_size: int = 200
    k: int = 10
    batch: int = 1
    speedup: int = 40  # in FLOPs, where the shape allows it

    @property
    def shape(self) -> Shape:
        """Experts as large as the speedup allows, but large enough for what few classes there are.

        Where experts are few, some classes are in none of them.
        """
        held = round(self.n_classes / self.speedup) - self.n_experts
        for_all = min(ceil(self.n_classes / self.n_experts), 2 * isqrt(self.n_classes))
        held = min(self.n_classes, max(held, for_all, self.k))
        return Shape(self.n_classes, self.n_experts, held, self.hidden_size)


@dataclass(frozen=True)
class Sweep:
    name: str
    axis: str  # what changes, by its name in the results
    settings: tuple[Setting, ...]


@dataclass(frozen=True)
class Effort:
    rounds: int
    microseconds: float  # of calls in a round, about
    most_calls: int = 300
    fewest_calls: int = 3


THOROUGH = Effort(rounds=9, microseconds=50_000)
HASTY = Effort(rounds=2, microseconds=2_000)

N_CLASSES = (100, 200, 500, 1_000, 2_000, 5_000, 10_000, 33_278, 100_000, 300_000, 1_000_000)
MANY_ROWS = 256
SPEEDUPS = (1, 2, 4, 8, 16, 32)


def with_experts(n_classes: int) -> Setting:
    """Few classes want few experts: K + V is least where both are about the root of N."""
    return Setting(n_classes=n_classes, n_experts=min(64, round(n_classes**0.5)))


def sweeps(quick: bool) -> list[Sweep]:
    held = Setting()
    every = slice(None, None, 4) if quick else slice(None)
    classes = [with_experts(n) for n in N_CLASSES if n <= 33_278 or not quick]
    many = [replace(each, batch=MANY_ROWS) for each in classes if each.n_classes <= 100_000]

    few = replace(held, n_experts=8)

    def swept(axis: str, values: Sequence[int], held: Setting = held) -> tuple[Setting, ...]:
        return tuple(replace(held, **{axis: value}) for value in values[every])

    return [
        Sweep("classes", "n_classes", tuple(classes[every])),
        Sweep("experts", "n_experts", swept("n_experts", (8, 16, 32, 64, 128, 256, 512, 1024))),
        Sweep("hidden size", "hidden_size", swept("hidden_size", (64, 128, 200, 512, 1024))),
        Sweep("answers", "k", swept("k", (1, 2, 5, 10, 20, 50, 100))),
        Sweep("rows of a call", "batch", swept("batch", (1, 4, 16, 64, 256, 1024))),
        Sweep(f"classes, {MANY_ROWS} rows", "n_classes", tuple(many[every])),
        Sweep("speedup in FLOPs", "flops_speedup", swept("speedup", SPEEDUPS, few)),
        Sweep(
            f"speedup in FLOPs, {MANY_ROWS} rows",
            "flops_speedup",
            swept("speedup", SPEEDUPS, replace(few, batch=MANY_ROWS)),
        ),
    ]


def measure(setting: Setting, effort: Effort) -> dict[str, Any]:
    """One setting: everybody in turns."""
    shape = setting.shape
    hidden = random_rows(ROWS, setting.hidden_size, seed=5)
    head = Head(random_rows(setting.n_classes, setting.hidden_size, seed=6), None)
    with tempfile.TemporaryDirectory() as folder:
        made = write_random(Path(folder) / "random", shape)
        engine = Engine(made, threads=1)
        floor = ByteFloor.of(made)
        experts = engine.topk(hidden, setting.k).experts
        calls: dict[str, Callable[[Rows], object]] = {
            "ours": lambda rows: engine.topk(rows, setting.k),
            **{each.name: each.one for each in exact_scans(head, setting.k)},
        }
        with one_thread():
            turns = [turn(call, hidden, setting.batch, effort) for call in calls.values()]
            turns.append(floor.turn(experts, seed=3))
            times = in_turns(turns, effort.rounds)
    figures = {
        name: summary(rounds, setting.batch) for name, rounds in zip(calls, times[:-1], strict=True)
    }
    full = min((name for name in figures if name != "ours"), key=lambda n: figures[n]["mean_us"])
    return {
        "n_classes": setting.n_classes,
        "n_experts": setting.n_experts,
        "hidden_size": setting.hidden_size,
        "k": setting.k,
        "batch": setting.batch,
        "classes_in_an_expert": shape.held,
        "flops_speedup": round(shape.flops_speedup, 2),
        "microseconds_per_row": figures,
        "fastest_full_scan": full,
        # Of single rows: in a batch an expert is read once for all of its rows.
        "floor": floor.figures(experts, times[-1]) if setting.batch == 1 else None,
    }


def turn(
    call: Callable[[Rows], object], hidden: Rows, batch: int, effort: Effort
) -> Callable[[], Times]:
    """So many calls that a round takes about as long for everybody."""
    rng = np.random.default_rng(1)
    first = call_times(call, [hidden[:batch]] * 3, 1)
    wanted = round(effort.microseconds / first.min())
    n_calls = min(effort.most_calls, max(effort.fewest_calls, wanted))
    warm_up = min(20, 1 + n_calls // 3)

    def calls() -> Times:
        if batch == 1:
            inputs = [
                hidden[row : row + 1] for row in rng.integers(len(hidden), size=warm_up + n_calls)
            ]
        else:
            inputs = [
                hidden[rows] for rows in rng.integers(len(hidden), size=(warm_up + n_calls, batch))
            ]
        return call_times(call, inputs, warm_up)

    return calls


def run(chosen: Sequence[Sweep], effort: Effort, say: Callable[[str], None]) -> dict[str, Any]:
    seen: dict[Setting, dict[str, Any]] = {}
    found = []
    for sweep in chosen:
        for setting in sweep.settings:
            if setting not in seen:
                seen[setting] = measure(setting, effort)
                say(report.line(seen[setting]))
        points = [seen[setting] for setting in sweep.settings]
        found.append({"name": sweep.name, "axis": sweep.axis, "points": points})
    return {
        "command": shlex.join(["python", "-m", "benchmarks.engines.scaling", *sys.argv[1:]]),
        "machine": machine("onnxruntime", "numba", "numpy", "torch"),
        "rounds": effort.rounds,
        "sweeps": found,
    }


@click.command()
@click.option("--quick", is_flag=True, help="Few settings and rounds; results go to runs/quick.")
@click.option("--rounds", type=int, help="In which all take turns.")
@click.option("--out", type=click.Path(path_type=Path), help="Results, as JSON.")
@click.option("--image", type=click.Path(path_type=Path), help="The picture.")
@click.option(
    "--document",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Markdown with scaling markers to fill.",
)
@click.option("--render", is_flag=True, help="Only draw and fill in what was measured before.")
def main(
    quick: bool,
    rounds: int | None,
    out: Path | None,
    image: Path | None,
    document: Path | None,
    render: bool,
) -> None:
    """Time this engine over shapes."""
    out = out or (QUICK / "scaling.json" if quick else RESULTS)
    image = image or (QUICK / "scaling.svg" if quick else IMAGE)
    effort = HASTY if quick else THOROUGH
    if rounds is not None:
        effort = replace(effort, rounds=rounds)
    try:
        if not render:
            found = run(sweeps(quick), effort, click.echo)
            out.parent.mkdir(parents=True, exist_ok=True)
            write_json(out, found)
        results = json.loads(out.read_text())
        report.draw(results, image)
        if document is not None:
            place = os.path.relpath(image, document.parent)
            write_part(document, "scaling", report.markdown(results, place))
    except DSSError as error:
        raise click.ClickException(str(error)) from error
    click.echo(report.crossovers(results))


if __name__ == "__main__":
    main()
