"""What a scrape of /metrics costs where there is much to show, and whom it makes wait.

    python -m benchmarks.http.scrapes --before ../older-checkout --document docs/performance.md

Serves a model of 10,000 experts, and 1,500 small models, from this checkout and from an older one.
Both are scraped in turns while another client asks /livez again and again: what it waits is how
long the event loop was busy with something else. Linux only.
"""

import http.client
import shlex
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import click

from benchmarks.document import table, write_part
from benchmarks.engines.random_bundles import Shape, write_random
from service.bench.server import HOST, ServerProcess, free_port, running, without_settings
from service.system.machine import machine
from trainer.data.files import write_json

ROOT = Path(__file__).parents[2]
START_SECONDS = 600.0
SCRAPE_SECONDS = 600.0
PAUSE_SECONDS = 0.001  # of who asks /livez
QUIET_SECONDS = 12.0  # without a scrape; every 10 seconds the server notes what was counted


@dataclass(frozen=True)
class Case:
    shape: Shape
    models: int
    workers: int

    @property
    def title(self) -> str:
        many = f"{self.models:,} models of " if self.models > 1 else ""
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return f"{many}{self.shape.n_experts:,} experts, {workers}"


LARGE = Shape(n_classes=20_000, n_experts=10_000, held=2, hidden_size=4)
SMALL = Shape(n_classes=12, n_experts=3, held=4, hidden_size=4)
CASES = (Case(LARGE, 1, 1), Case(LARGE, 1, 2), Case(SMALL, 1500, 1), Case(SMALL, 1500, 2))


@dataclass
class Side:
    scrape_seconds: list[float] = field(default_factory=list)
    page_bytes: int = 0
    longest_waits: list[float] = field(default_factory=list)  # of /livez during a scrape
    quiet_wait: float = 0.0  # the longest one without a scrape

    def medians(self) -> dict[str, float]:
        return {
            "scrape_s": round(statistics.median(self.scrape_seconds), 4),
            "page_mb": round(self.page_bytes / 1e6, 3),
            "longest_wait_s": round(statistics.median(self.longest_waits), 4),
            "longest_wait_unscraped_s": round(self.quiet_wait, 4),
        }


def write_models(case: Case, folder: Path) -> Path:
    """All models are one bundle, linked."""
    write_random(folder / "bundle", case.shape)
    for number in range(case.models):
        model = folder / "models" / f"m{number:04}"
        model.mkdir(parents=True)
        (model / "1").symlink_to(folder / "bundle")
    return folder / "models"


@contextmanager
def serving(checkout: Path, models: Path, workers: int, log: Path) -> Iterator[ServerProcess]:
    port = free_port()
    command = [sys.executable, "-m", "service.cli", "serve", "--models", str(models)]
    command += ["--port", str(port), "--workers", str(workers), "--drain-seconds", "0"]
    # A server that is ended because its event loop is blocked could not be measured.
    patient = {"DSS_STUCK_SECONDS": str(START_SECONDS)}
    env = without_settings() | patient | {"PYTHONPATH": str(checkout)}
    with running(command, log, env, folder=checkout) as process:
        server = ServerProcess(HOST, port, process=process, log=log)
        server.wait_until_ready(START_SECONDS)
        yield server


class Asking:
    """A client that asks /livez until the end of the block."""

    def __init__(self, server: ServerProcess) -> None:
        self.longest = 0.0
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> "Asking":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _ask(self) -> None:
        address = (self._server.host, self._server.port)
        with closing(http.client.HTTPConnection(*address, timeout=SCRAPE_SECONDS)) as connection:
            while not self._ended.wait(PAUSE_SECONDS):
                begun = perf_counter()
                connection.request("GET", "/livez")
                connection.getresponse().read()
                self.longest = max(self.longest, perf_counter() - begun)


def scrape(server: ServerProcess, side: Side) -> None:
    address = (server.host, server.port)
    with (
        Asking(server) as asking,
        closing(http.client.HTTPConnection(*address, timeout=SCRAPE_SECONDS)) as connection,
    ):
        begun = perf_counter()
        connection.request("GET", "/metrics")
        side.page_bytes = len(connection.getresponse().read())
        side.scrape_seconds.append(perf_counter() - begun)
    side.longest_waits.append(asking.longest)


def measure(case: Case, checkouts: Mapping[str, Path], rounds: int) -> dict[str, Any]:
    sides = {name: Side() for name in checkouts}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        models = write_models(case, Path(scratch))
        servers = {
            name: stack.enter_context(
                serving(checkout, models, case.workers, Path(scratch) / f"{name}.log")
            )
            for name, checkout in checkouts.items()
        }
        for name, server in servers.items():
            with Asking(server) as asking:
                sleep(QUIET_SECONDS)
            sides[name].quiet_wait = asking.longest
        for _ in range(rounds):
            for name, server in servers.items():
                scrape(server, sides[name])
    medians = {name: side.medians() for name, side in sides.items()}
    click.echo(f"{case.title}: {medians}")
    return {"case": asdict(case) | {"title": case.title}} | medians


@click.command()
@click.option("--before", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--rounds", type=int, default=7)
@click.option("--case", "chosen", type=int, multiple=True, help="Only these, counted from 0.")
@click.option("--out", type=click.Path(path_type=Path), default="benchmarks/results/scrapes.json")
@click.option("--document", type=click.Path(path_type=Path), help="Where the table goes.")
def main(
    before: Path, rounds: int, chosen: tuple[int, ...], out: Path, document: Path | None
) -> None:
    checkouts = {"before": before.resolve(), "now": ROOT}
    cases = [CASES[number] for number in chosen] or CASES
    found = {
        "command": shlex.join(["python", "-m", "benchmarks.http.scrapes", *sys.argv[1:]]),
        "machine": machine("prometheus-client"),
        "results": [measure(case, checkouts, rounds) for case in cases],
    }
    write_json(out, found)
    click.echo(rendered(found))
    if document is not None:
        write_part(document, "scrapes", rendered(found))


def rendered(found: dict[str, Any]) -> str:
    header = [
        "served",
        "page",
        "a scrape",
        "longest wait of others during it",
        "longest wait without a scrape",
    ]
    return table(header, [_row(result) for result in found["results"]])


def _row(result: dict[str, Any]) -> list[str]:
    before, now = result["before"], result["now"]

    def changed(name: str, unit: str, scale: float = 1.0) -> str:
        was, is_now = before[name] * scale, now[name] * scale
        return f"{was:.3g} -> {is_now:.3g} {unit} (1/{before[name] / now[name]:.3g})"

    return [
        result["case"]["title"],
        changed("page_mb", "MB"),
        changed("scrape_s", "s"),
        changed("longest_wait_s", "ms", 1000),
        changed("longest_wait_unscraped_s", "ms", 1000),
    ]


if __name__ == "__main__":
    main()
