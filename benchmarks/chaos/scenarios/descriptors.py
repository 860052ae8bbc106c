"""More connections than file descriptors: those that are served go on, and it recovers."""

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from benchmarks.chaos.harness import bundles, known_requests
from benchmarks.chaos.harness.load import Plan, loading
from benchmarks.chaos.harness.server_process import serving, wait_until
from benchmarks.chaos.harness.verdict import Context, Figures, NotPossible
from benchmarks.chaos.scenarios.fuzz import check_good
from service.bench.http_reader import ExchangeFailed, RawConnection, ask_once

TITLE = "file descriptors exhausted"
DESCRIPTORS = 100
CONNECTIONS = 300
RECOVERY_SECONDS = 2.0
BUSY_CPU = 0.5  # of a core, beyond what the load costs


def run(context: Context) -> Figures:
    figures = Figures()
    prlimit = shutil.which("prlimit")
    if prlimit is None:
        raise NotPossible("prlimit is not installed.")
    asked = known_requests.ask(bundles.write(context.folder / "models", [1]))
    prefix = (prlimit, f"--nofile={DESCRIPTORS}:{DESCRIPTORS}")
    seconds = context.choose(1.5, 10.0)
    with serving(context.folder / "models", context.folder / "run", prefix=prefix) as server:
        with loading(Plan(server.port, asked, connections=4, rate=100)) as load:
            load.wait_for_answers(50)
            figures.rss_start, figures.fds_start = server.rss(), server.descriptors()
            usual = _cores(server.cpu_seconds, seconds)
            with ExitStack() as stack:
                context.say(f"{CONNECTIONS} connections, {DESCRIPTORS} descriptors")
                for _ in range(CONNECTIONS):
                    with suppress(OSError):
                        stack.enter_context(RawConnection(server.port))
                held = server.descriptors()
                exhausted = _cores(server.cpu_seconds, seconds)
            context.say("connections closed")
            recovery = wait_until(
                lambda: _answers(server.port, asked[0].request), "a new connection is served"
            )
            wait_until(
                lambda: server.descriptors() <= (figures.fds_start or 0), "descriptors are free"
            )
            outcome = load.finish()
        check_good(server, asked[:8], figures)
        # The load's connections were open at the start.
        figures.rss_end, figures.fds_end = server.rss(), server.descriptors()
        log_bytes = server.log.stat().st_size
    outcome.counted_in(figures)
    figures.p50_ms, figures.p99_ms = outcome.percentile(50), outcome.percentile(99)
    figures.facts = {
        "descriptors at most": DESCRIPTORS,
        "descriptors held": held,
        "cores before": usual,
        "cores while exhausted": exhausted,
        "bytes of log": log_bytes,
    }
    figures.require_right()
    figures.require("connections that were served go on", not outcome.failed, dict(outcome.failed))
    figures.require_none_lost()
    spinning = exhausted - usual
    figures.require("it does not spin", spinning < BUSY_CPU, f"{spinning:.2f} cores more")
    figures.require("the log stays small", log_bytes < 100_000, f"{log_bytes:,} bytes")
    words = "new connections are served within 2 s once descriptors are free"
    figures.require(words, recovery <= RECOVERY_SECONDS, f"{recovery:.2f} s")
    figures.require_flat_descriptors()
    return figures


def _cores(cpu_seconds: Callable[[], float], seconds: float) -> float:
    begun, before = time.monotonic(), cpu_seconds()
    time.sleep(seconds)
    return (cpu_seconds() - before) / (time.monotonic() - begun)


def _answers(port: int, request: bytes) -> bool:
    try:
        return ask_once(port, request).status == 200
    except (OSError, ExchangeFailed):
        return False
