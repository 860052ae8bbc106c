"""How many rows a core answers over HTTP, and what a model weighs: the figures of docs/scaling.md.

A server with one worker is loaded by `dss bench http`'s own generator. Its CPU seconds, not the
clock's, are what rows are divided by: the generator shares the machine.

    python -m benchmarks.http.sizing --document docs/scaling.md
"""

import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.document import table, write_part
from benchmarks.engines.random_bundles import Shape, write_random
from service.bench import http, proc_stats, server
from service.bench.http import Sweep
from service.bundle import Bundle, Precision
from service.system.machine import machine
from trainer.data.files import write_json

RESULTS = Path("benchmarks/results/sizing.json")
# Rows of a request, and as many connections as keep the engine busy without being refused.
LOADS, K = ((1, 16), (32, 2)), 10
SECONDS, ATTEMPTS = 6.0, 3
MIB = 2**20


@dataclass(frozen=True)
class Sized:
    shape: Shape
    precision: Precision = "fp32"


NOTHING = Sized(Shape(n_classes=100, n_experts=1, held=100, hidden_size=8))
MODELS = (
    Sized(Shape(n_classes=10_000, n_experts=64, held=250, hidden_size=200)),
    Sized(Shape(n_classes=33_278, n_experts=64, held=600, hidden_size=200)),
    Sized(Shape(n_classes=33_278, n_experts=64, held=600, hidden_size=200), "int8"),
    Sized(Shape(n_classes=100_000, n_experts=256, held=1000, hidden_size=512)),
    Sized(Shape(n_classes=100_000, n_experts=256, held=1000, hidden_size=512), "fp16"),
    Sized(Shape(n_classes=1_000_000, n_experts=1024, held=2000, hidden_size=128)),
)


def measure(sized: Sized, folder: Path, seconds: float) -> dict[str, Any]:
    made = write_random(folder / "models" / "m" / "1", sized.shape, precision=sized.precision)
    points: list[dict[str, Any]] = []
    with server.started(folder / "models", workers=None) as running:
        (pid,) = proc_stats.serving(running.port)
        for batch, concurrency in LOADS:
            plan = Sweep(None, (batch,), (concurrency,), K, 1, "npy", seconds, ATTEMPTS, 1)
            points += http.sweep(plan, running, running.model(None), None).points
        resident = proc_stats.usage(pid).rss_bytes
    return {
        **asdict(sized.shape),
        "precision": sized.precision,
        "flops_speedup": sized.shape.flops_speedup,
        "bundle_bytes": size(made),
        "resident_bytes": resident,
        "points": points,
    }


def size(made: Bundle) -> int:
    return sum(entry.bytes for entry in made.manifest.files.values())


def rows_of_a_core(point: dict[str, Any]) -> float:
    return float(point["rows_per_second"] / point["server_cpu_per_second"])


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS)
@click.option("--document", type=click.Path(path_type=Path), help="Where the table goes.")
@click.option("--seconds", type=float, default=SECONDS, help="Of each point.")
def main(out: Path, document: Path | None, seconds: float) -> None:
    # Compiling takes memory that a server which finds its loops compiled does not.
    subprocess.run([sys.executable, "-m", "service.engine.kernels", "--all"], check=True)
    found = []
    for sized in (NOTHING, *MODELS):
        with tempfile.TemporaryDirectory(prefix="sizing-") as folder:
            found.append(measure(sized, Path(folder), seconds))
        click.echo(found[-1])
    results = {
        "command": shlex.join(["python", "-m", "benchmarks.http.sizing", *sys.argv[1:]]),
        "machine": machine("numpy", "numba", "uvicorn", "uvloop"),
        "nothing_resident_bytes": found[0]["resident_bytes"],
        "models": found[1:],
    }
    write_json(out, results)
    click.echo(rendered(results))
    if document is not None:
        write_part(document, "sizing", rendered(results))


def rendered(results: dict[str, Any]) -> str:
    header = [
        "classes", "experts of", "width", "stored as", "rows/s of a core, 1 row a request",
        "32 rows a request", "bundle", "server's memory", "above an empty one, per bundle byte",
    ]  # fmt: skip
    rows = []
    for model in results["models"]:
        above = model["resident_bytes"] - results["nothing_resident_bytes"]
        rows.append(
            [
                f"{model['n_classes']:,}",
                f"{model['n_experts']:,} x {model['held']:,}",
                f"{model['hidden_size']}",
                model["precision"],
                *(f"{rows_of_a_core(point):,.0f}" for point in model["points"]),
                f"{model['bundle_bytes'] / MIB:,.0f} MiB",
                f"{model['resident_bytes'] / MIB:,.0f} MiB",
                f"{above / model['bundle_bytes']:.2f}",
            ]
        )
    said = results["machine"]
    words = f"Measured on {said['cores']} cores of an {said['cpu']}, by `{results['command']}`."
    empty = results["nothing_resident_bytes"] / MIB
    words += f" A server with next to no model takes {empty:,.0f} MiB."
    return f"{words}\n\n{table(header, rows)}"


if __name__ == "__main__":
    main()
