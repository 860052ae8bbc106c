"""How soon workers start and are replaced, and what their processes hold in memory.

    python -m benchmarks.http.worker_start
    python -m benchmarks.http.worker_start --checkout . --checkout ../other-checkout

Serves the demo model with two workers. All workers are killed at once, so the next answer can only
come from a replacement. Several checkouts are measured in turns. Linux only.
"""

import argparse
import http.client
import os
import signal
import statistics
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from benchmarks.http.servers import NotServing
from service.bench.proc_stats import PROC, memory, tree
from service.bench.server import free_port, last_line, running, without_settings
from service.system.machine import machine

ROOT = Path(__file__).parents[2]
WORKERS = 2
START_SECONDS = 120.0  # kernels may have to be compiled
POLL_SECONDS = 0.002
MEBI = 2**20


@dataclass(frozen=True)
class Measured:
    start_seconds: float  # from the command to the first answer of /readyz
    replace_seconds: float  # from the end of all workers to the next such answer
    worker_pss: float
    supervisor_rss: float
    total_pss: float
    processes: int


ROWS = {
    "start to first answer, s": lambda one: one.start_seconds,
    "killed workers to next answer, s": lambda one: one.replace_seconds,
    "PSS per worker, MiB": lambda one: one.worker_pss / MEBI,
    "RSS of the supervisor, MiB": lambda one: one.supervisor_rss / MEBI,
    "PSS of all processes, MiB": lambda one: one.total_pss / MEBI,
    "processes": lambda one: one.processes,
}


def measure(checkout: Path, folder: Path) -> Measured:
    port, log = free_port(), folder / "log"
    command = [sys.executable, "-m", "service.cli", "serve", "--models", ROOT / "models"]
    arguments = ["--port", str(port), "--workers", str(WORKERS)]
    env = without_settings() | {"PYTHONPATH": str(checkout)}
    started = monotonic()
    with running([*command, *arguments], log, env, folder=checkout) as server:
        start_seconds = _wait_until_ready(port, log) - started
        workers = _workers(server.pid)
        everything, in_workers = memory(tree([server.pid])), memory(workers)
        (supervisor,) = memory([server.pid])
        killed = monotonic()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        replaced = _wait_until_ready(port, log)
        if set(_workers(server.pid)) & set(workers):
            raise NotServing("A worker that was killed is still there.")
    return Measured(
        start_seconds,
        replaced - killed,
        worker_pss=statistics.mean(size["Pss"] for size in in_workers),
        supervisor_rss=supervisor["Rss"],
        total_pss=sum(size["Pss"] for size in everything),
        processes=len(everything),
    )


def _wait_until_ready(port: int, log: Path) -> float:
    """When it was: a connection may be lost with a worker, so it is tried again."""
    deadline = monotonic() + START_SECONDS
    while monotonic() < deadline:
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
                connection.request("GET", "/readyz")
                if connection.getresponse().status == http.client.OK:
                    return monotonic()
        except (OSError, http.client.HTTPException):
            pass
        sleep(POLL_SECONDS)
    raise NotServing(f"No worker answers: {last_line(log)}")


def _workers(supervisor: int) -> list[int]:
    """Those of its descendants that have threads: neither it nor a fork server has any."""
    found = (pid for pid in tree([supervisor]) if pid != supervisor)
    return [pid for pid in found if len(list((PROC / str(pid) / "task").iterdir())) > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", type=Path, action="append", help="a folder with service/")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    checkouts = [path.resolve() for path in asked.checkout or [ROOT]]
    found: dict[Path, list[Measured]] = {path: [] for path in checkouts}
    for _ in range(asked.rounds):
        for checkout in checkouts:
            with tempfile.TemporaryDirectory() as folder:
                found[checkout].append(measure(checkout, Path(folder)))
    on = machine("uvicorn", "numba")
    sys.stdout.write(
        f"Medians of {asked.rounds} rounds on {on['cores']} cores of {on['cpu']}, "
        f"Python {on['python']}.\n\n| | {' | '.join(path.name for path in checkouts)} |\n"
        f"|---|{'---:|' * len(checkouts)}\n"
    )
    for name, value in ROWS.items():
        medians = [statistics.median(map(value, found[path])) for path in checkouts]
        sys.stdout.write(f"| {name} | {' | '.join(f'{one:.3g}' for one in medians)} |\n")


if __name__ == "__main__":
    main()
