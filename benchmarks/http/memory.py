"""What a worker of this service weighs with a model, above what it weighs without."""

from dataclasses import replace
from pathlib import Path

from benchmarks.http.body_formats import WIRES
from benchmarks.http.models import Models, size, write_random
from benchmarks.http.run import check_answers, serving
from benchmarks.http.servers import Server
from benchmarks.http.wrk import load, write_script
from service.bench.proc_stats import usage
from service.bench.server import HOST, ServerProcess

# About 80 MB, and about 0.1 MB: what a worker needs to serve any model at all.
LARGE_CLASSES, LARGE_EXPERTS = 100_000, 1_600
SMALL_CLASSES, SMALL_EXPERTS = 64, 1
ROWS, REQUESTS, CONCURRENCY, SECONDS = 32, 64, 4, 1


def measure_memory(ours: Server, models: Models, folder: Path) -> dict[str, float]:
    """Resident bytes with no model, a tiny one and a large one, each after load on all experts."""
    empty = folder / "none" / "models"
    empty.mkdir(parents=True)
    with serving(ours, replace(models, folder=empty), folder / "none" / "run") as (process, place):
        log = folder / "none" / "run" / "log"
        ServerProcess(HOST, place.port, process=process, log=log).wait_for("/livez")
        nothing = usage(process.pid).rss_bytes
    small, small_size = _loaded(ours, models, folder / "small", SMALL_CLASSES, SMALL_EXPERTS)
    large, large_size = _loaded(ours, models, folder / "large", LARGE_CLASSES, LARGE_EXPERTS)
    return {
        "no_model_rss_bytes": nothing,
        "small_bundle_bytes": small_size,
        "small_rss_bytes": small,
        "bundle_bytes": large_size,
        "rss_bytes": large,
        "above_no_model_per_bundle_byte": (large - nothing) / large_size,
        "above_small_model_per_bundle_byte": (large - small) / (large_size - small_size),
    }


def _loaded(
    ours: Server, models: Models, folder: Path, n_classes: int, expert_size: int
) -> tuple[int, int]:
    """Resident bytes of the worker, and of the bundle on disk."""
    path = folder / "models" / "topk" / "1"
    made = write_random(path, n_classes, expert_size, seed=0)
    served = replace(models, folder=folder / "models", paths=models.paths | {"sparse": path})
    wire = WIRES["npy"]
    with serving(ours, served, folder / "run") as (process, place):
        bodies = served.bodies(ROWS, REQUESTS)
        expected = served.expected("sparse", bodies)
        check_answers(process, folder / "run" / "log", place.port, wire, bodies, expected)
        script = write_script(folder / "load", place.port, wire, bodies)
        load(script, place.port, CONCURRENCY, SECONDS)
        return usage(process.pid).rss_bytes, size(made)
