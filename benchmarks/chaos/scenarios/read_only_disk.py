"""Models and temporary files on a disk that cannot be written, as containers have them."""

import shutil

from benchmarks.chaos.harness import bundles, known_requests
from benchmarks.chaos.harness.disks import disk, read_only
from benchmarks.chaos.harness.load import Plan, loading
from benchmarks.chaos.harness.server_process import WATCHING, serving, wait_until
from benchmarks.chaos.harness.verdict import Context, Figures

TITLE = "read-only disk while loading"
DISK_MIB = 64
LOOK_SECONDS = 30.0


def run(context: Context) -> Figures:
    figures = Figures()
    made = bundles.write(context.folder / "made", [1, 2])
    asked = known_requests.ask(made)
    with (
        disk(context.folder / "disk", DISK_MIB) as writable,
        read_only(writable, context.folder / "read-only") as seen,
    ):
        (writable / "tmp").mkdir()
        shutil.copytree(made[1].path, writable / "models" / "m" / "1")
        env = WATCHING | {"TMPDIR": str(seen / "tmp")}
        with serving(seen / "models", context.folder / "run", env=env) as server:
            with loading(Plan(server.port, asked, connections=8, rate=300)) as load:
                load.wait_for_answers(100)
                figures.rss_start = server.rss()
                shutil.copytree(made[2].path, writable / "models" / "m" / "2")
                loaded = wait_until(
                    lambda: 2 in server.loaded(), "version 2 is loaded", LOOK_SECONDS
                )
                load.wait_for_answers(context.count(200, 1000))
                outcome = load.finish()
            figures.rss_end = server.rss()
            status = server.stop()
    outcome.counted_in(figures)
    figures.p50_ms, figures.p99_ms = outcome.percentile(50), outcome.percentile(99)
    figures.facts = {"seconds until the new version was loaded": loaded}
    figures.require_right()
    figures.require_none_failed()
    figures.require_none_lost()
    figures.require("SIGTERM ends it with status 0", status == 0, status)
    return figures
