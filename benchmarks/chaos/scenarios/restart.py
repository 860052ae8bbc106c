"""Restarts under keep-alive load: SIGTERM of a worker, and one server in place of another.

Clients keep their connections until they are told to close them. Where one server takes another's
place, new connections go to the new one once it is ready, as a load balancer sends them, and then
the old one gets SIGTERM.
"""

import os
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack

from benchmarks.chaos.harness import bundles, known_requests
from benchmarks.chaos.harness.answer_check import Question
from benchmarks.chaos.harness.load import Outcome, Plan, Running, loading
from benchmarks.chaos.harness.server_process import (
    Server,
    serving,
    until_replaced,
    wait_until,
)
from benchmarks.chaos.harness.verdict import Context, Figures
from service.bench.proc_stats import is_running

TITLE = "restarts under keep-alive load"
WORKERS = 2
DRAIN_SECONDS = 2.0
RATE, CONNECTIONS = 400.0, 32
STOP_SECONDS = 30.0


def run(context: Context) -> Figures:
    figures = Figures()
    asked = known_requests.ask(bundles.write(context.folder / "models", [1]))
    for workers in (1, WORKERS):
        context.say(f"servers with {workers} workers, one after the other")
        _replace_servers(context, figures, asked, workers)
    context.say("SIGTERM of each worker in turn")
    with (
        _start(context, WORKERS) as server,
        loading(Plan(server.port, asked, CONNECTIONS, rate=RATE)) as load,
    ):
        load.wait_for_answers(300)
        for worker in server.workers():
            _end_worker(server, worker, load)
        os.kill(server.process.pid, signal.SIGHUP)  # keys and certificates are read again
        load.wait_for_answers(300)
        outcome = load.finish()
    _require(figures, outcome, "workers ended in turn")
    figures.p50_ms, figures.p99_ms = outcome.percentile(50), outcome.percentile(99)
    figures.require_right()
    return figures


def _start(context: Context, workers: int, number: int = 0) -> AbstractContextManager[Server]:
    arguments = ("--drain-seconds", str(DRAIN_SECONDS), "--workers", str(workers))
    folder = context.folder / (f"run-{number}" if number else "run")
    return serving(context.folder / "models", folder, *arguments)


def _replace_servers(
    context: Context, figures: Figures, asked: Sequence[Question], workers: int
) -> None:
    statuses = []
    with ExitStack() as stack:
        server = stack.enter_context(_start(context, workers))
        load = stack.enter_context(loading(Plan(server.port, asked, CONNECTIONS, rate=RATE)))
        load.wait_for_answers(300)
        for number in range(1, context.count(1, 2) + 1):
            after = stack.enter_context(_start(context, workers, number))
            load.move_to(after.port)
            statuses.append(server.stop(STOP_SECONDS))
            server = after
            load.wait_for_answers(300)
        outcome = load.finish()
    _require(figures, outcome, f"server replaced, {workers} workers")
    words = f"{workers} workers: every server ends with status 0"
    figures.require(words, set(statuses) == {0}, statuses)


def _end_worker(server: Server, worker: int, load: Running) -> None:
    os.kill(worker, signal.SIGTERM)
    wait_until(lambda: not is_running(worker), "the worker has ended", STOP_SECONDS)
    load.wait_for_answers(300)
    until_replaced(server, worker, WORKERS)


def _require(figures: Figures, outcome: Outcome, words: str) -> None:
    outcome.counted_in(figures)
    figures.require(f"{words}: none lost", not outcome.lost, len(outcome.lost))
    found = dict(outcome.failed) or 0
    figures.require(f"{words}: none failed", not outcome.failed, found)
