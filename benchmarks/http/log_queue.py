"""The log queue, on the standard library's QueueListener, against a writing thread of our own.

    python -m benchmarks.http.log_queue

Both put the same JSON lines into a pipe that a process reads, in turns, in bursts that the queue
has room for. Our own thread joins lines that wait into one write; the listener writes each one.
"""

import gc
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from statistics import median
from time import perf_counter
from typing import Protocol

import click

from benchmarks.document import table
from service.server.server import SWITCH_SECONDS
from service.system.machine import machine
from service.telemetry.log_queue import FLUSH_SECONDS, ROOM, Entry, LogQueue
from service.telemetry.logging_setup import JsonLines

READER = "import os\nwhile os.read(0, 1 << 16): pass"
BURST = ROOM // 4
FIELDS = {"request_id": "4f1e", "route": "/topk", "status": 200, "seconds": 0.000123}

Measured = tuple[float, float]  # microseconds of a log call, lines written in a second


class Writer(Protocol):
    def handle(self, record: logging.LogRecord) -> bool | logging.LogRecord: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class JoiningWriter(logging.Handler):
    """A thread of our own, which joins lines as long as a pipe keeps them together."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: SimpleQueue[Entry] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record).encode("utf-8", "backslashreplace") + b"\n"
        if self._lines.qsize() < ROOM:
            self._lines.put(line)

    def wait(self) -> None:
        written = threading.Event()
        self._lines.put(written)
        written.wait(FLUSH_SECONDS)

    def close(self) -> None:
        self._lines.put(None)
        self._thread.join(FLUSH_SECONDS)
        super().close()

    def _work(self) -> None:
        chunk = b""
        while True:
            entry = self._next(wait=not chunk)
            if isinstance(entry, bytes) and 0 < len(entry) <= select.PIPE_BUF - len(chunk):
                chunk += entry
                continue
            if chunk:
                os.write(self._descriptor, chunk)
                chunk = b""
            if entry is None:
                return
            if isinstance(entry, threading.Event):
                entry.set()
            else:
                chunk = entry

    def _next(self, *, wait: bool) -> Entry:
        try:
            return self._lines.get(block=wait)
        except Empty:
            return b""


def joining(descriptor: int) -> Writer:
    writer = JoiningWriter(descriptor)
    writer.setFormatter(JsonLines())
    return writer


def listener(descriptor: int) -> Writer:
    queue = LogQueue(descriptor)
    queue.setFormatter(JsonLines())
    return queue


def measure(make: Callable[[int], Writer], lines: int) -> Measured:
    with subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE) as reader:  # noqa: S603
        if reader.stdin is None:
            raise RuntimeError("The reader has no pipe.")
        writer = make(reader.stdin.fileno())
        record = logging.makeLogRecord(
            {"name": "service.access", "levelname": "INFO", "msg": "POST /topk 200", **FIELDS}
        )
        bursts, calls = max(1, lines // BURST), 0.0
        gc.collect()
        begun = perf_counter()
        for _ in range(bursts):
            before = perf_counter()
            for _ in range(BURST):
                writer.handle(record)
            calls += perf_counter() - before
            writer.wait()
        seconds = perf_counter() - begun
        writer.close()
    return calls / (bursts * BURST) * 1e6, bursts * BURST / seconds


@click.command()
@click.option("--lines", default=40_000, show_default=True, help="In each turn.")
@click.option("--turns", default=9, show_default=True)
def main(lines: int, turns: int) -> None:
    sys.setswitchinterval(SWITCH_SECONDS)  # as the server does
    writers = {"a thread of our own": joining, "the listener": listener}
    found: dict[str, list[Measured]] = {name: [] for name in writers}
    for _ in range(turns):
        for name, make in writers.items():
            found[name].append(measure(make, lines))
    rows = []
    for name, measured in found.items():
        calls, rates = zip(*measured, strict=True)
        best = [f"{min(calls):.1f}", f"{max(rates):,.0f}"]
        rows.append([name, *best, f"{median(calls):.1f}", f"{median(rates):,.0f}"])
    about = machine()
    click.echo(f"{about['cores']} cores of {about['cpu']}; {turns} turns of {lines} lines\n")
    header = ["writer", "us of a call, best", "lines/s, best", "us, median", "lines/s, median"]
    click.echo(table(header, rows))
    ratios = [new[0] / old[0] for old, new in zip(*found.values(), strict=True)]
    click.echo(f"\nA call takes {median(ratios):.2f} times as long with the listener (median).")


if __name__ == "__main__":
    main()
