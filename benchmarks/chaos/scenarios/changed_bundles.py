"""A bundle that is overwritten, truncated, deleted and replaced while it is served."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.chaos.harness import bundles, known_requests
from benchmarks.chaos.harness.load import Plan, loading
from benchmarks.chaos.harness.server_process import WATCHING, serving
from benchmarks.chaos.harness.verdict import Context, Figures
from service.bench.proc_stats import is_running

TITLE = "bundle overwritten, truncated, deleted and replaced while served"
WEIGHTS = "experts/weights.bin"


def run(context: Context) -> Figures:
    figures = Figures()
    models = context.folder / "models"
    made = bundles.write(models, [1, 2])
    other = bundles.write(context.folder / "other", [3])[3]
    # Version 2 may answer as it was first, or as what takes its place, but never as a mixture.
    asked = known_requests.ask([*made.items(), (2, other)])
    served = models / "m" / "2"
    workers = context.count(1, 2)
    arguments = ("--workers", str(workers))
    env = WATCHING | {"DSS_REPOSITORY__KEEP_VERSIONS": "1"}
    with serving(models, context.folder / "run", *arguments, env=env) as server:
        pids = server.pids()
        with loading(Plan(server.port, asked, connections=8, rate=500)) as load:
            load.wait_for_answers(200)
            figures.rss_start = server.rss()
            changes: dict[str, Callable[[], object]] = {
                "overwritten": partial(_overwrite, served),
                "truncated": partial(_truncate, served),
                "deleted": partial(shutil.rmtree, served),
                "replaced": partial(shutil.copytree, other.path, served),
            }
            for words, change in changes.items():
                context.say(words)
                change()
                load.wait_for_answers(context.count(400, 2000))
            outcome = load.finish()
        figures.rss_end = server.rss()
        alive = all(is_running(pid) for pid in pids)
        newest = server.listed()["version"]
    outcome.counted_in(figures)
    figures.p50_ms, figures.p99_ms = outcome.percentile(50), outcome.percentile(99)
    figures.require("no process died", alive)
    figures.require("version 2 is served in the end", newest == 2, newest)
    figures.require_right()
    figures.require_none_failed()
    figures.require_none_lost()
    figures.require_flat_memory()
    return figures


def _overwrite(folder: Path) -> None:
    path = folder / WEIGHTS
    with path.open("r+b") as stream:  # the same file, not another of its name
        stream.write(os.urandom(path.stat().st_size))


def _truncate(folder: Path) -> None:
    for name in (WEIGHTS, "gate.onnx", "experts/000.onnx", "index/classes.npy"):
        os.truncate(folder / name, 0)
