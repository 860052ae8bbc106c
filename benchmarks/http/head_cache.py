"""This service with and without its cache of request heads, in turns on the demo model.

    python -m benchmarks.http --head-cache

One worker, requests of one row as .npy. Throughput is measured at 16 connections, the median
latency at one; every round starts both servers anew, in the other order than the round before.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.http import models as http_models
from benchmarks.http.run import Plan, measure
from benchmarks.http.servers import HEAD_CACHE, HEAD_CACHE_OFF, ROOT, NotServing, Server
from service.settings import Settings

RESULTS = Path("benchmarks/results/head-cache.json")
DEMO = ROOT / "models" / "demo" / "1"
CONTESTANTS = (HEAD_CACHE, HEAD_CACHE_OFF)
MANY, ONE = 16, 1  # connections


def compare(rounds: int, seconds: int, folder: Path) -> dict[str, Any]:
    if "head_cache" not in Settings.model_fields:
        raise NotServing("dss serve has no setting head_cache here.")
    models = http_models.prepare(folder / "model", DEMO, DEMO / "samples.npy")
    plan = Plan(batches=(1,), concurrencies=(MANY, ONE), seconds=seconds)
    found = [
        {server.name: one_turn(server, models, plan, folder / f"{number}-{place}")
         for place, server in enumerate(in_turn(CONTESTANTS, number))}
        for number in range(rounds)
    ]  # fmt: skip
    return {
        "rounds": rounds,
        "seconds": seconds,
        "connections": MANY,
        "contestants": [
            {
                "name": server.name,
                "settings": server.settings,
                "requests_per_second": median(turn[server.name][0] for turn in found),
                "p50_us": median(turn[server.name][1] for turn in found),
            }
            for server in CONTESTANTS
        ],
        # Within a round, so that what else the machine does falls on both.
        "throughput_ratio": median(ratio(turn, 0) for turn in found),
        "p50_ratio": median(ratio(turn, 1) for turn in found),
    }


def in_turn(servers: Sequence[Server], number: int) -> Sequence[Server]:
    return servers if number % 2 == 0 else servers[::-1]


def one_turn(
    server: Server, models: http_models.Models, plan: Plan, folder: Path
) -> tuple[float, float]:
    """Requests a second at many connections, and p50 in microseconds at one."""
    many, one = measure(server, models, plan, folder)
    for point in (many, one):
        if point.errors:
            raise NotServing(f"{server.name}: wrk counted errors: {point.errors}")
    print(f"{server.name}: {many.requests_per_second:,.0f}/s, {one.p50_us:.0f} us", flush=True)  # noqa: T201
    return many.requests_per_second, one.p50_us


def ratio(turn: dict[str, tuple[float, float]], figure: int) -> float:
    return turn[HEAD_CACHE.name][figure] / turn[HEAD_CACHE_OFF.name][figure]


def render(results: dict[str, Any]) -> str:
    rows = [
        f"| {one['name']} | {one['requests_per_second']:,.0f} | {one['p50_us']:,.0f} |"
        for one in results["contestants"]
    ]
    rows.append(f"| ratio | {results['throughput_ratio']:.2f} | {results['p50_ratio']:.2f} |")
    said = results["machine"]
    heading = f"| | requests/s at {results['connections']} connections | p50 at one, us |"
    words = (
        f"Measured on {said['cores']} cores of an {said['cpu']}, by `{results['command']}`: the"
        f" demo model, one worker, medians of {results['rounds']} rounds of {results['seconds']} s."
    )
    return "\n".join([words, "", heading, "|---|---|---|", *rows])
