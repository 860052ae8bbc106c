"""Long load at 80% of what the server can do: nothing grows."""

import time
from itertools import pairwise

import numpy as np

from benchmarks.chaos.harness import bundles, known_requests
from benchmarks.chaos.harness.load import Outcome, Plan, loading
from benchmarks.chaos.harness.load import run as load
from benchmarks.chaos.harness.server_process import serving
from benchmarks.chaos.harness.verdict import Context, Figures
from benchmarks.engines.random_bundles import Shape

TITLE = "soak at 80% load"
SHAPE = Shape(n_classes=20_000, n_experts=16, held=2000, hidden_size=64)
QUICK_SECONDS = 6.0
SAMPLES = 60  # of memory and descriptors
PARTS = 3  # whose latencies are compared
SLOWER, SLOWER_MS = 1.5, 2.0


def run(context: Context) -> Figures:
    figures = Figures()
    asked = known_requests.ask(
        bundles.write(context.folder / "models", [1], SHAPE), rows=(1, 8, 32)
    )
    seconds = QUICK_SECONDS if context.quick else 60 * context.soak_minutes
    rss, fds = [], []
    with serving(context.folder / "models", context.folder / "run") as server:
        peak = load(Plan(server.port, asked, 16, seconds=context.choose(1.5, 10.0)))
        rate = 0.8 * peak.rate()
        context.say(f"peak {peak.rate():,.0f} requests/s")
        with loading(Plan(server.port, asked, 32, rate=rate, seconds=seconds)) as running:
            running.wait_for_answers(100)
            begun = time.monotonic()
            for number in range(SAMPLES):
                time.sleep(max(0.0, begun + (number + 1) * seconds / SAMPLES - time.monotonic()))
                rss.append(server.rss())
                fds.append(server.descriptors())
                if number % 6 == 5:
                    said = f"{running.answered:,} answers, {rss[-1] / 2**20:,.1f} MB, {fds[-1]} fds"
                    context.say(said)
            outcome = running.finish(stop=False)
    peak.counted_in(figures)
    outcome.counted_in(figures)
    figures.p50_ms, figures.p99_ms = outcome.percentile(50), outcome.percentile(99)
    # The first tenth warms up; the load's end may come before the last looks.
    tenth = SAMPLES // 10
    figures.rss_start = int(np.median(rss[tenth : 2 * tenth]))
    figures.rss_end = int(np.median(rss[-2 * tenth :]))
    figures.fds_start, figures.fds_end = max(fds[: 2 * tenth]), max(fds[-2 * tenth :])
    p99 = _by_part(outcome)
    figures.facts = {
        "minutes": seconds / 60,
        "requests/s": rate,
        "peak, requests/s": peak.rate(),
        "p99 by thirds, ms": ", ".join(f"{value:.2f}" for value in p99),
    }
    figures.require_right()
    figures.require_none_failed()
    figures.require_none_lost()
    figures.require_flat_memory()
    figures.require_flat_descriptors()
    if not context.quick:  # a machine with other work tells nothing about time
        words = "p99 of the last third at most 1.5 times that of the first, or 2 ms more"
        most = max(SLOWER * p99[0], p99[0] + SLOWER_MS)
        figures.require(words, p99[-1] <= most, f"{p99[0]:.2f} ms, then {p99[-1]:.2f} ms")
        share = outcome.answered / max(outcome.sent, 1)
        figures.require("at least 99.9% answered", share >= 0.999, f"{share:.3%}")
    return figures


def _by_part(outcome: Outcome) -> list[float]:
    edges = np.linspace(outcome.begun, outcome.ended, PARTS + 1)
    return [outcome.percentile(99, since, until) for since, until in pairwise(edges)]
