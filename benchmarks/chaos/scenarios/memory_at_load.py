"""A version larger than the memory that is left appears: it is refused, the old one serves on."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from benchmarks.chaos.harness import bundles, known_requests
from benchmarks.chaos.harness.load import Plan, loading
from benchmarks.chaos.harness.memory_group import limited
from benchmarks.chaos.harness.server_process import (
    WATCHING,
    NeverHappened,
    Server,
    serving,
    wait_until,
)
from benchmarks.chaos.harness.verdict import MIB, Context, Figures
from benchmarks.engines.random_bundles import Shape
from service.bench.proc_stats import is_running
from service.bench.target import ServerNotReachable
from service.bundle import Bundle

TITLE = "a version larger than the memory that is left"
LARGE = Shape(n_classes=200_000, n_experts=16, held=12_500, hidden_size=768)  # 614 MB
ROOM_BYTES = 256 * MIB  # beside what the server takes when idle
SETTLE_SECONDS = 30.0
NUMBER = re.compile(r"\d[\d,.]*")


def run(context: Context) -> Figures:
    figures = Figures()
    small = bundles.write(context.folder / "small", [1, 3])
    large = bundles.write(context.folder / "large", [2], LARGE)[2]
    for workers in range(1, context.count(1, 2) + 1):
        context.say(f"{workers} workers")
        _appears(context, figures, small, large, workers)
    figures.require_right()
    figures.require_none_failed()
    figures.require_none_lost()
    return figures


def _appears(
    context: Context, figures: Figures, small: dict[int, Bundle], large: Bundle, workers: int
) -> None:
    """The large version, in the folder of a server that may take 256 MB more than when idle."""
    models = context.folder / f"models-{workers}"
    put(small[1].path, models, 1)
    folder, arguments = context.folder / "run", ("--workers", str(workers))
    with serving(models, folder, *arguments) as unlimited:
        idle = sum(map(_proportional_bytes, unlimited.pids()))
    asked = known_requests.ask(small)
    with (
        limited(idle + ROOM_BYTES) as group,
        serving(models, folder, *arguments, env=WATCHING, prefix=group.prefix) as server,
    ):
        before = server.pids()
        with loading(Plan(server.port, asked, connections=8, rate=200)) as load:
            load.wait_for_answers(100)
            put(large.path, models, 2)
            reason = _refused(server)
            load.wait_for_answers(100, seconds=5.0)
            put(small[3].path, models, 3)
            fits = _serves(server, 3)
            load.wait_for_answers(100, seconds=5.0)
            outcome = load.finish()
        killed = group.processes_killed()
        died = [pid for pid in before if not is_running(pid)]
    outcome.counted_in(figures)
    said = f"{workers} worker" + "s" * (workers > 1)
    numbers = NUMBER.findall((reason or "").replace("version 2", ""))
    words = f"{said}: refused, with two numbers"
    figures.require(words, len(numbers) >= 2, reason or "it is not refused")
    figures.require(f"{said}: no process was killed", not killed and not died, f"{killed} killed")
    figures.require(f"{said}: a version that fits is loaded afterwards", fits)
    figures.facts[f"{said}: limit, MB"] = (idle + ROOM_BYTES) / MIB
    figures.facts[f"{said}: longest silence, s"] = outcome.longest_silence(
        outcome.begun + 0.5, outcome.ended
    )


def _proportional_bytes(pid: int) -> int:
    """What a process takes, with its share of the pages that it has in common with others."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def put(source: Path, models: Path, version: int) -> None:
    """In one step, without a copy."""
    staged = models.with_name(f"{models.name}-staged")
    shutil.copytree(source, staged, copy_function=os.link)
    (models / "m").mkdir(parents=True, exist_ok=True)
    staged.rename(models / "m" / str(version))


def _refused(server: Server) -> str | None:
    """Why; None if it is not, whatever happens instead."""
    with suppress(NeverHappened, ServerNotReachable, KeyError):
        wait_until(lambda: 2 in server.refused(), "the large version is refused", SETTLE_SECONDS)
        return server.refused()[2]
    return None


def _serves(server: Server, version: int) -> bool:
    with suppress(NeverHappened, ServerNotReachable):
        wait_until(lambda: version in server.loaded(), "it is loaded", SETTLE_SECONDS)
        return True
    return False
