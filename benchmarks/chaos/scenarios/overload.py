"""Ten times as many requests as can be answered: what is accepted is answered as fast as ever.

The model is slow enough for its engine to be what limits. Its peak is what four connections get,
each asking again when it has its answer; the usual latency is that at 80% of the peak.
"""

import time

import numpy as np

from benchmarks.chaos.harness import bundles, known_requests
from benchmarks.chaos.harness.load import Outcome, Plan, loading
from benchmarks.chaos.harness.load import run as load
from benchmarks.chaos.harness.server_process import Server, serving
from benchmarks.chaos.harness.verdict import MIB, Context, Figures
from benchmarks.engines.random_bundles import Shape

TITLE = "overload by ten"
SHAPE = Shape(n_classes=100_000, n_experts=8, held=24_000, hidden_size=32)
ROWS = 64  # of a request, which then takes the engine some milliseconds
USUAL, OVER = 0.8, 10.0  # of the peak
CLOSED_CONNECTIONS, OPEN_CONNECTIONS, MANY_CONNECTIONS = 4, 64, 512
P99_RATIO, GOODPUT_SHARE = 3.0, 0.9
MEMORY_BYTES = 128 * MIB


def run(context: Context) -> Figures:
    figures = Figures()
    made = bundles.write(context.folder / "models", [1], SHAPE)
    asked = known_requests.ask(made, kinds=("npy",), rows=(ROWS,), count=32)
    seconds = context.choose(2.0, 30.0)
    with serving(context.folder / "models", context.folder / "run") as server:
        load(Plan(server.port, asked, CLOSED_CONNECTIONS, seconds=context.choose(1.0, 5.0)))
        peak = load(Plan(server.port, asked, CLOSED_CONNECTIONS, seconds=seconds))
        context.say(f"peak {peak.rate():,.0f} requests/s, p99 {peak.percentile(99):.1f} ms")
        rate = USUAL * peak.rate()
        usual = load(Plan(server.port, asked, OPEN_CONNECTIONS, rate=rate, seconds=seconds))
        context.say(f"at 80%: p99 {usual.percentile(99):.1f} ms, {usual.rejected} rejected")
        figures.rss_start = server.rss()
        rate = OVER * peak.rate()
        plan = Plan(server.port, asked, MANY_CONNECTIONS, rate=rate, seconds=seconds)
        over, largest, cores = _watched(plan, server, seconds)
        context.say(f"at 1000%: p99 {over.percentile(99):.1f} ms, {over.rate():,.0f} answers/s")
        figures.rss_end = server.rss()
        # The machine's own speed changes by the minute: what came before is compared with both.
        again = load(Plan(server.port, asked, CLOSED_CONNECTIONS, seconds=seconds))
        context.say(f"peak again {again.rate():,.0f} requests/s")
    for outcome in (peak, usual, over, again):
        outcome.counted_in(figures)
    figures.p50_ms, figures.p99_ms = over.percentile(50), over.percentile(99)
    figures.facts = _facts(peak, usual, over, largest) | {
        "peak afterwards, requests/s": again.rate(),
        "CPU of the server, cores": cores,
    }
    figures.require_right()
    figures.require_none_failed()
    figures.require_none_lost()
    offered = over.sent / (over.ended - over.begun) / peak.rate()
    least = context.choose(2.0, 9.0)  # beside other tests the load generator has less of the CPU
    words = f"at least {least:g} times the peak was sent"
    figures.require(words, offered >= least, f"{offered:.1f} times")
    figures.require("some requests were rejected", over.rejected > 0, over.rejected)
    if not context.quick:  # a machine with other work tells nothing about time
        _require_speed(figures, (peak.rate() + again.rate()) / 2, usual, over)
    grown = largest - figures.rss_start
    words = "memory bounded: at most 128 MB more"
    figures.require(words, grown <= MEMORY_BYTES, f"{grown / MIB:.0f} MB")
    return figures


def _require_speed(figures: Figures, peak: float, usual: Outcome, over: Outcome) -> None:
    ratio = over.percentile(99) / usual.percentile(99)
    words = "p99 of accepted requests at most 3 times that at 80% load"
    figures.require(words, ratio <= P99_RATIO, f"{ratio:.2f} times")
    share = over.rate() / peak
    words = "goodput at least 90% of the peak, the mean of before and after"
    figures.require(words, share >= GOODPUT_SHARE, f"{share:.0%}")


def _watched(plan: Plan, server: Server, seconds: float) -> tuple[Outcome, int, float]:
    """What the load saw, and the most memory and the cores that the server took."""
    largest = 0
    with loading(plan) as running:
        running.wait_for_answers(1)
        begun, cpu = time.monotonic(), server.cpu_seconds()
        while time.monotonic() < begun + seconds - 1:
            largest = max(largest, server.rss())
            time.sleep(0.2)
        cores = (server.cpu_seconds() - cpu) / (time.monotonic() - begun)
        return running.finish(stop=False), largest, cores


def _facts(peak: Outcome, usual: Outcome, over: Outcome, largest: int) -> dict[str, object]:
    def milliseconds(values: object, share: float) -> float:
        found = np.frombuffer(values, np.float32)  # type: ignore[call-overload]
        return float(np.percentile(found, share) * 1000) if found.size else 0.0

    return {
        "rows of a request": ROWS,
        "peak, requests/s": peak.rate(),
        "p50 at the peak, ms": peak.percentile(50),
        "rejected at the peak": peak.rejected,
        "p50 at 80%, ms": usual.percentile(50),
        "p99 at 80%, ms": usual.percentile(99),
        "rejected at 80%": usual.rejected,
        "sent at 1000%, requests/s": over.sent / (over.ended - over.begun),
        "goodput at 1000%, requests/s": over.rate(),
        "p99 at 1000%, since it was sent, ms": milliseconds(over.service, 99),
        "p50 of a rejection, ms": milliseconds(over.rejections, 50),
        "p99 of a rejection, ms": milliseconds(over.rejections, 99),
        "CPU of the load generator, cores": over.cpu_seconds / (over.ended - over.begun),
        "most memory, MB": largest / MIB,
    }
