"""What counting costs, beside what a request costs that is counted.

Counting is timed by itself: an engine call's share and an HTTP answer's. What a request costs is
the server's CPU time in benchmarks/results/http.json, so run `python -m benchmarks.http` first.

    python -m benchmarks.http.metrics --bundle models/demo/1 --document docs/performance.md
"""

import json
import shlex
import sys
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import click
import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.document import table, write_part
from service import bundle as bundles
from service.engine import Engine
from service.system.machine import machine
from service.telemetry.metrics.registry import Metrics
from trainer.data.files import write_json

HTTP = Path("benchmarks/results/http.json")
CALLS, ROUNDS = 2000, 15
JOINED = (1, 8)


def call_microseconds(call: Any, *arguments: Any) -> float:  # noqa: ANN401
    """Of one call, in the median round."""
    rounds = []
    for _ in range(ROUNDS):
        started = perf_counter_ns()
        for _ in range(CALLS):
            call(*arguments)
        rounds.append((perf_counter_ns() - started) / CALLS / 1000)
    return float(np.median(rounds))


def request_microseconds(concurrency: int) -> float:
    """Of the server's CPU, for a request of one row as .npy."""
    points = json.loads(HTTP.read_text())["medians"]
    for point in points:
        if (point["line"], point["batch"], point["concurrency"]) == ("ours", 1, concurrency):
            return 1e6 / float(point["requests_per_cpu_second"])
    raise click.ClickException(f"{HTTP} has no point for concurrency {concurrency}.")


@click.command()
@click.option("--bundle", type=click.Path(path_type=Path), required=True)
@click.option("--out", type=click.Path(path_type=Path), default="benchmarks/results/metrics.json")
@click.option("--document", type=click.Path(path_type=Path), help="Where the table goes.")
def main(bundle: Path, out: Path, document: Path | None) -> None:
    made = bundles.read(bundle)
    metrics = Metrics(CollectorRegistry())
    model, counter = metrics.model("model", 1, made), metrics.http.counter("/topk", "POST", 200)
    hidden = np.random.default_rng(0).normal(size=(max(JOINED), made.manifest.hidden_size))
    engine = Engine(made)
    answered = call_microseconds(counter.answered, 1e-4)
    results = []
    for requests, concurrency in zip(JOINED, (1, 16), strict=True):
        result = engine.topk(hidden[:requests].astype(np.float32), 10)
        waits = [1e-5] * requests
        executed = call_microseconds(model.executed, waits, requests, 1e-4, result)
        counted, whole = executed / requests + answered, request_microseconds(concurrency)
        results.append(
            {
                "concurrency": concurrency,
                "joined": requests,
                "counting_us": round(counted, 3),
                "request_cpu_us": round(whole, 1),
                "share": round(counted / whole, 4),
            }
        )
    found = {
        "command": shlex.join(["python", "-m", "benchmarks.http.metrics", *sys.argv[1:]]),
        "machine": machine("numpy", "numba", "prometheus-client"),
        "experts": made.manifest.n_experts,
        "results": results,
    }
    write_json(out, found)
    click.echo(rendered(found))
    if document is not None:
        write_part(document, "metrics", rendered(found))


def rendered(found: dict[str, Any]) -> str:
    header = ["concurrency", "requests joined", "counting a request", "CPU of a request", "share"]
    rows = [
        [
            str(result["concurrency"]),
            str(result["joined"]),
            f"{result['counting_us']:.2f} us",
            f"{result['request_cpu_us']:.0f} us",
            f"{result['share']:.1%}",
        ]
        for result in found["results"]
    ]
    return table(header, rows)


if __name__ == "__main__":
    main()
