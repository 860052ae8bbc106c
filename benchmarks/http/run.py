"""One server from start to end: known answers first, then load at every point of the plan."""

import http.client
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import Popen

import numpy as np

from benchmarks.http.body_formats import WIRES, Classes, Rows, Wire
from benchmarks.http.models import Models
from benchmarks.http.servers import ROOT, NotServing, Place, Server, python_of
from benchmarks.http.wrk import Load, load, write_script
from service.bench.proc_stats import Usage, usage
from service.bench.server import START_SECONDS, free_port, last_line, running

POLL_SECONDS = 0.1
LONGEST_WORDS = 200
CHECKS, CHECKS_AT_ONCE = 64, 16  # on connections of their own, so that every worker is asked
WARM_UP_CONCURRENCY, WARM_UP_SECONDS = 16, 1
BODIES = {1: 256, 32: 32}  # how many requests take turns, by their rows


@dataclass(frozen=True)
class Plan:
    batches: tuple[int, ...]
    concurrencies: tuple[int, ...]
    seconds: int


@dataclass(frozen=True)
class Point:
    line: str
    batch: int
    concurrency: int
    requests: int
    requests_per_second: float
    p50_us: float
    p90_us: float
    p99_us: float
    errors: dict[str, int]
    server_cpu_seconds: float
    requests_per_cpu_second: float | None  # of the server
    wrk_cpu_seconds: float
    seconds: float
    rss_bytes: int
    pss_bytes: int
    processes: int

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def measure(server: Server, models: Models, plan: Plan, folder: Path) -> Iterator[Point]:
    with serving(server, models, folder) as (process, place):
        for number, name in enumerate(server.wires):
            wire = WIRES[name]
            checked = models.bodies(rows=3, count=16)
            expected = models.expected(server.model, checked)
            check_answers(process, folder / "log", place.port, wire, checked, expected)
            scripts = {
                batch: write_script(
                    folder / f"{number}-{batch}",
                    place.port,
                    wire,
                    models.bodies(batch, BODIES.get(batch, 32)),
                )
                for batch in plan.batches
            }
            load(scripts[plan.batches[0]], place.port, WARM_UP_CONCURRENCY, WARM_UP_SECONDS)
            for batch, script in scripts.items():
                for concurrency in plan.concurrencies:
                    before = usage(process.pid)
                    found, wrk_seconds = load(script, place.port, concurrency, plan.seconds)
                    after = usage(process.pid)
                    yield _point(
                        server.line(name), batch, concurrency, found, before, after, wrk_seconds
                    )


@contextmanager
def serving(server: Server, models: Models, folder: Path) -> Iterator[tuple[Popen[bytes], Place]]:
    folder.mkdir(parents=True)
    place = Place(python_of(server), free_port(), folder, models)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HTTP_BENCH_MODEL": server.model,
        "HTTP_BENCH_PATH": str(models.paths[server.model]),
        "HTTP_BENCH_WIDTH": str(models.hidden.shape[1]),
        **server.environment,
    }
    command, log = server.command(place), folder / "log"
    with running(command, log, environment, folder=ROOT) as process:
        yield process, place


def last_words(log: Path) -> str:
    """The end of what a server said, without the folders of this machine."""
    said = last_line(log) or "nothing"
    return re.sub(r"(/[\w.+-]+)+/", "", said)[-LONGEST_WORDS:]


def check_answers(
    process: Popen[bytes],
    log: Path,
    port: int,
    wire: Wire,
    bodies: Sequence[Rows],
    expected: Sequence[Classes],
) -> None:
    """Wait until the server answers, and go on only if the classes are right, also when joined."""
    deadline = time.monotonic() + START_SECONDS
    problem: str | None = ""
    while problem is not None:
        problem = _problem(port, wire, bodies[0], expected[0])
        if process.poll() is not None:
            raise NotServing(f"It ended while starting: {last_words(log)}")
        if problem and time.monotonic() > deadline:
            said = last_words(log)
            raise NotServing(f"It did not answer in {START_SECONDS:g} s ({problem}): {said}")
        if problem:
            time.sleep(POLL_SECONDS)
    with ThreadPoolExecutor(CHECKS_AT_ONCE) as pool:
        turns = [number % len(bodies) for number in range(CHECKS)]
        problems = pool.map(lambda turn: _problem(port, wire, bodies[turn], expected[turn]), turns)
        for problem in filter(None, problems):
            raise NotServing(f"It does not answer {CHECKS_AT_ONCE} requests at once ({problem}).")


def _problem(port: int, wire: Wire, hidden: Rows, expected: Classes) -> str | None:
    """Why there is no answer yet; one that is wrong is a failure at once."""
    try:
        status, headers, body = ask(port, wire, hidden)
    except OSError as error:
        return str(error)
    if status != 200:
        return f"status {status}"
    try:
        found = wire.decode(body, headers)
    except (LookupError, ValueError) as error:
        raise NotServing(f"Its answer is not understood: {error!r} in {body[:200]!r}.") from error
    if not np.array_equal(found, expected):
        raise NotServing(f"It answers other classes: {found[0]}, not {expected[0]}.")
    return None


def ask(port: int, wire: Wire, hidden: Rows) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", wire.path, wire.encode(hidden), wire.headers(hidden))
        response = connection.getresponse()
        return (
            response.status,
            {name.lower(): value for name, value in response.getheaders()},
            response.read(),
        )
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP answer: {error!r}") from error
    finally:
        connection.close()


def _point(
    line: str,
    batch: int,
    concurrency: int,
    found: Load,
    before: Usage,
    after: Usage,
    wrk_seconds: float,
) -> Point:
    cpu_seconds = after.cpu_seconds - before.cpu_seconds
    return Point(
        line=line,
        batch=batch,
        concurrency=concurrency,
        requests=found.requests,
        requests_per_second=found.requests_per_second,
        p50_us=found.p50_us,
        p90_us=found.p90_us,
        p99_us=found.p99_us,
        errors=found.errors,
        server_cpu_seconds=cpu_seconds,
        requests_per_cpu_second=found.requests / cpu_seconds if cpu_seconds > 0 else None,
        wrk_cpu_seconds=wrk_seconds,
        seconds=found.seconds,
        rss_bytes=after.rss_bytes,
        pss_bytes=after.pss_bytes,
        processes=after.processes,
    )
