"""kill -9 of a worker under load: the others serve, another takes its place."""

import os
import signal
from contextlib import suppress
from itertools import pairwise
from time import monotonic

from benchmarks.chaos.harness import bundles, known_requests
from benchmarks.chaos.harness.load import Outcome, Plan, loading
from benchmarks.chaos.harness.server_process import Server, client_ports, serving, until_replaced
from benchmarks.chaos.harness.verdict import Context, Figures

TITLE = "kill -9 of a worker under load"
WORKERS = 2


def run(context: Context) -> Figures:
    figures = Figures()
    asked = known_requests.ask(bundles.write(context.folder / "models", [1]))
    kills = context.count(1, WORKERS)  # no worker twice: one that keeps dying is made to wait
    killed: set[int] = set()
    serving_again, at_strength, when = [], [], []
    arguments = ("--workers", str(WORKERS))
    with serving(context.folder / "models", context.folder / "run", *arguments) as server:
        # Half of what the machine can do: a worker must find time to start.
        with loading(Plan(server.port, asked, connections=16, rate=500)) as load:
            load.wait_for_answers(300)
            figures.rss_start = server.rss()
            for number, victim in enumerate(server.workers()[:kills], 1):
                context.say(f"kill {number} of {kills}")
                killed |= client_ports(victim, server.port)
                when.append(monotonic())
                os.kill(victim, signal.SIGKILL)
                at_strength.append(until_replaced(server, victim, WORKERS))
                load.wait_for_answers(200)
            figures.rss_end = server.rss()
            _kill_helpers(server)
            load.wait_for_answers(context.count(200, 2000))
            outcome = load.finish()
        _require_exact_metrics(figures, server, outcome)
    outcome.counted_in(figures)
    figures.p50_ms, figures.p99_ms = outcome.percentile(50), outcome.percentile(99)
    for begun, ends in pairwise([*when, outcome.ended]):
        failures = [at - begun for at in outcome.failures if begun <= at < ends]
        serving_again.append(max(failures, default=0.0))
    elsewhere = sum(port not in killed for _, port in outcome.lost)
    figures.facts = {
        "kills": kills,
        "seconds until clients see no failure": max(serving_again),
        "seconds until all workers answer": max(at_strength),
        "longest silence": max(
            outcome.longest_silence(at, min(at + 2, outcome.ended)) for at in when
        ),
    }
    figures.require_right()
    figures.require("none lost but those on the killed worker", not elsewhere, elsewhere)
    others = {kind: count for kind, count in outcome.failed.items() if kind.startswith("status")}
    figures.require("no failed request on a live worker", not others, others or 0)
    most = context.choose(15.0, 2.0)  # the quick form runs beside other tests
    for words in ("seconds until clients see no failure", "seconds until all workers answer"):
        seconds = figures.facts[words]
        figures.require(f"{words}: at most {most:g}", seconds <= most, f"{seconds:.2f}")
    figures.require_flat_memory()
    return figures


def _kill_helpers(server: Server) -> None:
    """Those that answer nothing themselves; nobody must notice."""
    for pid in set(server.pids()[1:]) - set(server.workers()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _require_exact_metrics(figures: Figures, server: Server, outcome: Outcome) -> None:
    """Answers that a killed worker counted but never sent may be more, none may be missing."""
    _, text = server.get("/metrics")
    counted = sum(
        float(line.rpartition(" ")[2])
        for line in text.decode().splitlines()
        if line.startswith("dss_http_requests_total") and 'status="200"' in line and "POST" in line
    )
    exact = outcome.answered <= counted <= outcome.answered + len(outcome.lost)
    words = "/metrics counts the answered requests, those of killed workers included"
    figures.require(words, exact, f"{counted:.0f} for {outcome.answered}")
