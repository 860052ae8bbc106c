"""A thousand connections that say nothing, beside normal traffic."""

import resource
from contextlib import ExitStack
from dataclasses import replace

from benchmarks.chaos.harness import bundles, known_requests
from benchmarks.chaos.harness.load import Plan
from benchmarks.chaos.harness.load import run as load
from benchmarks.chaos.harness.server_process import serving, wait_until
from benchmarks.chaos.harness.verdict import MIB, Context, Figures, NotPossible
from service.bench.http_reader import RawConnection

TITLE = "1,000 idle connections"
CONNECTIONS = 1000
SLOWER = 2.0


def run(context: Context) -> Figures:
    figures = Figures()
    _allow_descriptors(CONNECTIONS + 200)
    asked = known_requests.ask(bundles.write(context.folder / "models", [1]))
    seconds = context.choose(0.7, 15.0)
    with serving(context.folder / "models", context.folder / "run") as server:
        plan = Plan(server.port, asked, connections=8, rate=300, seconds=seconds)
        load(replace(plan, seconds=0.3))  # warm
        figures.rss_start, figures.fds_start = server.rss(), server.descriptors()
        before = load(plan)
        with ExitStack() as stack:
            idle = [stack.enter_context(RawConnection(server.port)) for _ in range(CONNECTIONS)]
            context.say(f"{CONNECTIONS} connections are open")
            with_idle = server.rss()
            outcome = load(plan)
            # The first and the last one are not forgotten: they are served when they speak.
            for connection in (idle[0], idle[-1]):
                connection.send(asked[0].request)
                figures.sent += 1
                if connection.answer().status == 200:
                    figures.answered += 1
                else:
                    figures.fail("idle connection")
        wait_until(lambda: server.descriptors() <= (figures.fds_start or 0), "descriptors are free")
        figures.rss_end, figures.fds_end = server.rss(), server.descriptors()
    for one in (before, outcome):
        one.counted_in(figures)
    figures.p50_ms, figures.p99_ms = outcome.percentile(50), outcome.percentile(99)
    figures.facts = {
        "p50 without them, ms": before.percentile(50),
        "p99 without them, ms": before.percentile(99),
        "bytes of memory for each": (with_idle - figures.rss_start) // CONNECTIONS,
    }
    figures.require_right()
    figures.require_none_failed()
    figures.require_none_lost()
    limit = max(SLOWER * before.percentile(50), before.percentile(50) + 1.0)
    words = "p50 at most twice as long, or 1 ms more"
    figures.require(words, figures.p50_ms <= limit, f"{figures.p50_ms:.2f} ms")
    grown = (with_idle - figures.rss_start) / MIB
    figures.require("they take less than 64 MB", grown < 64, f"{grown:.0f} MB")
    figures.require_flat_descriptors()
    return figures


def _allow_descriptors(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise NotPossible(f"This user may open {hard} files; {wanted} are needed.")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
