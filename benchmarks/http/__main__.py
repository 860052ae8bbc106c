"""This service against other servers, one after the other on one machine, under wrk.

    python -m benchmarks.http                      all servers, 3 s a point, 3 rounds
    python -m benchmarks.http --quick              1 s a point, 1 round: does everything work?
    python -m benchmarks.http --servers ours,floor
    python -m benchmarks.http --tables docs/performance.md    measures nothing, renders the JSON
    python -m benchmarks.http --head-cache         this service alone, with and without its cache

Every server is first asked for answers that are known, then loaded; no two run at once. Rounds go
through the servers forwards and backwards in turn, since machines drift, and medians are taken
over the rounds. A server that cannot be installed or started is listed with the reason.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.http import head_cache, tables
from benchmarks.http import models as http_models
from benchmarks.http.memory import measure_memory
from benchmarks.http.models import Models
from benchmarks.http.precision import with_precision
from benchmarks.http.ratios import medians, ratios
from benchmarks.http.run import Plan, measure
from benchmarks.http.servers import SERVERS, NotServing, Server, versions_of
from benchmarks.http.wrk import WRK, LoadFailed
from service.bench.server import ServerNotStarted
from service.system.machine import machine

RESULTS = Path("benchmarks/results/http.json")
PACKAGES = ("fastapi", "httptools", "numba", "numpy", "onnxruntime", "orjson", "uvicorn", "uvloop")


def main() -> None:
    options = _options()
    if options.tables:
        results = with_precision(with_ratios(json.loads(options.out.read_text())))
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        tables.update(options.tables, results)
        return
    if shutil.which(WRK) is None:
        sys.exit("wrk is needed: apt-get install wrk")
    with tempfile.TemporaryDirectory(prefix="http-benchmark-") as folder:
        if options.head_cache:
            results = _facts() | compare_head_cache(options, Path(folder))
        else:
            results = with_precision(compare(options, Path(folder)))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    _say(head_cache.render(results) if options.head_cache else tables.render(results))


def compare_head_cache(options: Namespace, folder: Path) -> dict[str, Any]:
    try:
        return head_cache.compare(options.rounds, options.seconds, folder)
    except (NotServing, LoadFailed) as error:
        sys.exit(str(error))


def _options() -> Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.http", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1 s a point, 1 round")
    parser.add_argument("--servers", help="comma-separated parts of names, e.g. ours,mosec [all]")
    parser.add_argument("--seconds", type=int, default=3, help="whole seconds a point [3]")
    parser.add_argument("--rounds", type=int, default=3, help="[3]")
    parser.add_argument("--batches", default="1,32", help="rows of a request [1,32]")
    parser.add_argument("--concurrencies", default="1,16", help="connections [1,16]")
    parser.add_argument("--bundle", type=Path, help="[a random one of WikiText-2's size]")
    parser.add_argument("--hidden", type=Path, help="rows to ask about, .npy [random]")
    parser.add_argument("--no-memory", action="store_true", help="leave the memory ratio out")
    parser.add_argument(
        "--head-cache", action="store_true", help="compare with DSS_HEAD_CACHE=false"
    )
    parser.add_argument("--out", type=Path, help=f"[{RESULTS}, {head_cache.RESULTS}]")
    parser.add_argument("--tables", type=Path, help="render --out into this document, and end")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.rounds = 1, 1
    if options.out is None:
        options.out = head_cache.RESULTS if options.head_cache else RESULTS
    return options


def with_ratios(results: dict[str, Any]) -> dict[str, Any]:
    """What was measured, with the ratios worked out anew."""
    found = {
        (point["line"], point["batch"], point["concurrency"]): {
            name: value for name, value in point.items() if isinstance(value, int | float)
        }
        for point in results["medians"]
    }
    anew = ratios(found, results["machine"]["cores"], results["memory"])
    return results | {"ratios": [ratio.as_json() for ratio in anew]}


def compare(options: Namespace, folder: Path) -> dict[str, Any]:
    servers = [server for server in SERVERS if _chosen(server, options.servers)]
    plan = Plan(_numbers(options.batches), _numbers(options.concurrencies), options.seconds)
    models = http_models.prepare(folder / "model", options.bundle, options.hidden)
    points, failures = _all_rounds(servers, models, plan, options.rounds, folder)
    memory = None
    ours = SERVERS[0]
    if ours in servers and not options.no_memory:
        _say("memory")
        try:
            memory = measure_memory(ours, models, folder / "memory")
        except (NotServing, ServerNotStarted, LoadFailed) as error:
            failures["memory"] = str(error)
    found = medians(points)
    return _facts() | {
        "peers": {server.peer: versions_of(server) for server in servers if _installed(server)},
        "model": models.facts,
        "plan": asdict(plan) | {"rounds": options.rounds, "wrk_threads": 1},
        "lines": {
            server.line(wire): {
                "server": server.name,
                "model": server.model,
                "wire": wire,
                "settings": server.settings,
            }
            for server in servers
            for wire in server.wires
        },
        "failures": failures,
        "ratios": [
            ratio.as_json() for ratio in ratios(found, len(os.sched_getaffinity(0)), memory)
        ],
        "memory": memory,
        "medians": [
            {"line": line, "batch": batch, "concurrency": concurrency} | numbers
            for (line, batch, concurrency), numbers in found.items()
        ],
        "points": points,
    }


def _facts() -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "-m", "benchmarks.http", *sys.argv[1:]]),
        "machine": machine(*PACKAGES) | {"wrk": _wrk_version()},
    }


def _all_rounds(
    servers: list[Server], models: Models, plan: Plan, rounds: int, folder: Path
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Every point of every round, and by server's name what went wrong."""
    points: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for number in range(1, rounds + 1):
        for place, server in enumerate(servers if number % 2 else servers[::-1]):
            if server.name in failures:
                continue
            _say(f"round {number}: {server.name}")
            try:
                for point in measure(server, models, plan, folder / f"{number}-{place}"):
                    points.append({"round": number} | point.as_json())
                    _say(_summary(points[-1]))
            except (NotServing, LoadFailed) as error:
                failures[server.name] = str(error)
                _say(f"  {failures[server.name]}")
    return points, failures


def _summary(point: dict[str, Any]) -> str:
    errors = f", errors {point['errors']}" if point["errors"] else ""
    return (
        f"  {point['line']}: batch {point['batch']}, concurrency {point['concurrency']}:"
        f" {point['requests_per_second']:,.0f} requests/s, p50 {point['p50_us']:,.0f} us{errors}"
    )


def _chosen(server: Server, wanted: str | None) -> bool:
    return wanted is None or any(part.strip() in server.name for part in wanted.split(","))


def _installed(server: Server) -> bool:
    return server.peer is not None and bool(versions_of(server))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _wrk_version() -> str:
    done = subprocess.run([WRK, "-v"], capture_output=True, text=True, check=False)  # noqa: S603
    return (done.stdout + done.stderr).split(" [")[0].removeprefix("wrk ")


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
