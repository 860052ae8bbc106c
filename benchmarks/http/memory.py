"""What a worker of this service weighs with a model, above what it weighs without."""

import http.client
import time
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

from benchmarks.http.body_formats import WIRES
from benchmarks.http.models import Models, size, write_random
from benchmarks.http.run import POLL_SECONDS, START_SECONDS, check_answers, serving
from benchmarks.http.server_process import NotServing, last_words, weigh
from benchmarks.http.servers import Server
from benchmarks.http.wrk import load, write_script

# About 80 MB, and about 0.1 MB: what a worker needs to serve any model at all.
LARGE_CLASSES, LARGE_EXPERTS = 100_000, 1_600
SMALL_CLASSES, SMALL_EXPERTS = 64, 1
ROWS, REQUESTS, CONCURRENCY, SECONDS = 32, 64, 4, 1


def measure_memory(ours: Server, models: Models, folder: Path) -> dict[str, float]:
    """Resident bytes with no model, a tiny one and a large one, each after load on all experts."""
    empty = folder / "none" / "models"
    empty.mkdir(parents=True)
    with serving(ours, replace(models, folder=empty), folder / "none" / "run") as (process, place):
        _wait_until_alive(process, place.port, folder / "none" / "run" / "log")
        nothing = weigh(process.pid).rss_bytes
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
        return weigh(process.pid).rss_bytes, size(made)


def _wait_until_alive(process: Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/livez")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(POLL_SECONDS)
        finally:
            connection.close()
    raise NotServing(f"A worker without models does not live: {last_words(log)}")
