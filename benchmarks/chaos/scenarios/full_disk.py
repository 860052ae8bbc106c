"""The disk of models, temporary files and log is full while a version is loaded."""

import shutil

from benchmarks.chaos.harness import bundles, known_requests
from benchmarks.chaos.harness.disks import disk, fill
from benchmarks.chaos.harness.load import Plan, loading
from benchmarks.chaos.harness.server_process import WATCHING, serving, wait_until
from benchmarks.chaos.harness.verdict import Context, Figures
from service.bench.proc_stats import is_running

TITLE = "disk full while loading"
DISK_MIB = 16
LOOK_SECONDS = 30.0


def run(context: Context) -> Figures:
    figures = Figures()
    made = bundles.write(context.folder / "made", [1, 2, 3, 4])
    asked = known_requests.ask(made)
    with disk(context.folder / "disk", DISK_MIB) as full:
        models, temporary = full / "models", full / "tmp"
        temporary.mkdir()
        shutil.copytree(made[1].path, models / "m" / "1")
        shutil.copytree(made[2].path, models / "m" / ".2")
        env = WATCHING | {"TMPDIR": str(temporary)}
        arguments = ("--workers", str(context.count(1, 2)))
        with serving(models, full / "run", *arguments, env=env) as server:
            pids = server.pids()
            with loading(Plan(server.port, asked, connections=8, rate=300)) as load:
                load.wait_for_answers(100)
                figures.rss_start = server.rss()
                context.say("the disk is full")
                filler = fill(full)
                (models / "m" / ".2").rename(models / "m" / "2")
                wait_until(
                    lambda: 2 in server.loaded() | server.refused().keys(),
                    "version 2 is looked at",
                    LOOK_SECONDS,
                )
                refused = server.refused().get(2)
                copied = _copy(made[3].path, models / "m" / "3")
                load.wait_for_answers(context.count(200, 1000))
                half = server.loaded() & {3}
                context.say("the disk has room")
                filler.unlink()
                shutil.rmtree(models / "m" / "3", ignore_errors=True)
                shutil.copytree(made[4].path, models / "m" / "4")
                after = wait_until(
                    lambda: 4 in server.loaded(), "version 4 is loaded", LOOK_SECONDS
                )
                load.wait_for_answers(200)
                outcome = load.finish()
            figures.rss_end = server.rss()
            alive = all(is_running(pid) for pid in pids)
    outcome.counted_in(figures)
    figures.p50_ms, figures.p99_ms = outcome.percentile(50), outcome.percentile(99)
    figures.facts = {
        "version 2, whole on the full disk": f"refused: {refused}" if refused else "loaded",
        "seconds until a version is loaded once there is room": after,
    }
    figures.require("no process died", alive)
    figures.require("a copy cut short by the full disk is not served", not copied and not half)
    figures.require_right()
    figures.require_none_failed()
    figures.require_none_lost()
    return figures


def _copy(source: object, destination: object) -> bool:
    """Whether there was room."""
    try:
        shutil.copytree(str(source), str(destination))
    except (OSError, shutil.Error):
        return False
    return True
