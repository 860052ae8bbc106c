"""New versions dropped into the models folder under full load."""

import shutil
from functools import partial
from time import monotonic

from benchmarks.chaos.harness import bundles, known_requests
from benchmarks.chaos.harness.load import Plan, loading
from benchmarks.chaos.harness.server_process import WATCHING, Server, serving, wait_until
from benchmarks.chaos.harness.verdict import Context, Figures
from benchmarks.engines.random_bundles import Shape

TITLE = "version swaps under full load"
# 2 MB: a version that is not let go is seen.
SHAPE = Shape(n_classes=5000, n_experts=8, held=1000, hidden_size=64)
CONNECTIONS = 16
SWAP_SECONDS = 60.0
WARM_SWAPS = 5  # before memory is first looked at


def run(context: Context) -> Figures:
    figures = Figures()
    swaps = context.count(8, 100)
    models, made = context.folder / "models", context.folder / "made"
    versions = bundles.write(made, range(1, swaps + 2), SHAPE)
    asked = known_requests.ask(versions, rows=(1, 3, 8))
    shutil.copytree(made / "m" / "1", models / "m" / "1")
    took = []
    env = WATCHING | {"DSS_REPOSITORY__KEEP_VERSIONS": "1"}
    with (
        serving(models, context.folder / "run", env=env) as server,
        loading(Plan(server.port, asked, CONNECTIONS)) as load,
    ):
        load.wait_for_answers(500)
        for version in range(2, swaps + 2):
            begun = monotonic()
            (made / "m" / str(version)).rename(models / "m" / str(version))
            wait_until(
                partial(_serves, server, version),
                f"version {version} is served",
                SWAP_SECONDS,
            )
            took.append(monotonic() - begun)
            load.wait_for_answers(50)
            shutil.rmtree(models / "m" / str(version - 1))
            if version == WARM_SWAPS + 1:
                figures.rss_start, figures.fds_start = server.rss(), server.descriptors()
            if version % 10 == 1:
                context.say(f"{version - 1} swaps, {load.answered:,} answers")
        wait_until(lambda: server.loaded() == {swaps + 1}, "only the newest is loaded")
        load.wait_for_answers(200)
        figures.rss_end, figures.fds_end = server.rss(), server.descriptors()
        outcome = load.finish()
    outcome.counted_in(figures)
    figures.p50_ms, figures.p99_ms = outcome.percentile(50), outcome.percentile(99)
    figures.facts = {
        "swaps": swaps,
        "seconds of a swap, at most": max(took),
        "answers a second": outcome.rate(),
    }
    figures.require(f"{swaps} versions served one after the other", len(took) == swaps, len(took))
    figures.require_none_failed()
    figures.require("nothing rejected", not outcome.rejected, outcome.rejected)
    words = "no wrong answer, so none mixed of two versions"
    figures.require(words, not outcome.wrong, outcome.wrong)
    figures.require_none_lost()
    figures.require_flat_memory()
    figures.require_flat_descriptors()
    return figures


def _serves(server: Server, version: int) -> bool:
    return bool(server.listed()["version"] == version)
