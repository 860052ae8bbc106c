"""The system's clock jumps by hours and years under load, forwards and backwards.

libfaketime changes what the server's processes see of the wall clock; the monotonic clock goes on,
as it does when an operator or NTP sets the time.
"""

import email.utils
import time
from functools import partial
from pathlib import Path

from benchmarks.chaos.harness import bundles, known_requests
from benchmarks.chaos.harness.load import Plan, loading
from benchmarks.chaos.harness.server_process import NeverHappened, Server, serving, wait_until
from benchmarks.chaos.harness.verdict import Context, Figures, NotPossible
from service.bench.http_reader import ask_once

TITLE = "clock jumps under load"
JUMPS = {
    "an hour on": "+3600",
    "a day back": "-86400",
    "ten years on": "+315360000",
    "to 1970": None,
}
SLACK_SECONDS = 60.0


def library() -> str:
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not found:
        raise NotPossible("libfaketime is not installed: apt-get install faketime")
    return str(found[0])


def run(context: Context) -> Figures:
    figures = Figures()
    asked = known_requests.ask(bundles.write(context.folder / "models", [1]))
    jumps = dict(list(JUMPS.items())[context.count(-2, 0) :])
    clock = context.folder / "clock"
    clock.write_text("+0\n")
    env = {
        "LD_PRELOAD": library(),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",  # seconds until the file is read again
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    arguments = ("--workers", str(context.count(1, 2)))
    with serving(context.folder / "models", context.folder / "run", *arguments, env=env) as server:
        with loading(Plan(server.port, asked, connections=8, rate=300)) as load:
            load.wait_for_answers(100)
            figures.rss_start = server.rss()
            for words, jump in jumps.items():
                context.say(words)
                offset = float(jump) if jump else 60.0 - time.time()
                _set(clock, offset)
                try:
                    wait_until(partial(_is_seen, server, offset), f"the clock jumps {words}", 10.0)
                except NeverHappened as error:
                    raise NotPossible(f"The clock cannot be moved here: {error}") from error
                load.wait_for_answers(context.count(200, 2000))
            _set(clock, 0.0)
            load.wait_for_answers(100)
            outcome = load.finish()
        figures.rss_end = server.rss()
        metrics = server.get("/metrics")[0]
        ready = server.get("/readyz")[0]
        status = server.stop()
    outcome.counted_in(figures)
    figures.p50_ms, figures.p99_ms = outcome.percentile(50), outcome.percentile(99)
    figures.facts = {"jumps": ", ".join(jumps)}
    figures.require_right()
    figures.require_none_failed()
    figures.require_none_lost()
    silence = outcome.longest_silence(outcome.begun + 0.5, outcome.ended)
    most = context.choose(5.0, 1.0)  # the quick form runs beside other tests
    figures.require(f"never silent for {most:g} s", silence < most, f"{silence:.3f} s")
    figures.require("/metrics and /readyz answer", (metrics, ready) == (200, 200), (metrics, ready))
    figures.require("SIGTERM ends it with status 0", status == 0, status)
    return figures


def _set(clock: Path, offset: float) -> None:
    """In one step: the library reads the file at every call."""
    temporary = clock.with_suffix(".new")
    temporary.write_text(f"{offset:+.0f}\n")
    temporary.replace(clock)


def _is_seen(server: Server, offset: float) -> bool:
    """Whether an answer's Date is as far from this process's clock."""
    request = b"GET /livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    date = email.utils.parsedate_to_datetime(ask_once(server.port, request).headers["date"])
    return abs(date.timestamp() - time.time() - offset) < SLACK_SECONDS
