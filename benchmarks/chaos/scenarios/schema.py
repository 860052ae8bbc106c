"""schemathesis: requests made from the server's own OpenAPI document, good and bad ones.

Once as anybody, and once more about what only administrators may do, with everybody being one.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.chaos.harness import attack_bundles, known_requests
from benchmarks.chaos.harness.server_process import Server, serving
from benchmarks.chaos.harness.verdict import Context, Figures, NotPossible
from benchmarks.chaos.scenarios.fuzz import check_good
from service.bench.http_reader import ANSWER_SECONDS, HOST
from service.bench.proc_stats import is_running

TITLE = "schemathesis over the OpenAPI document"
# A document cannot say how wide a model's rows are, so much that it allows is refused.
EXCLUDED = "positive_data_acceptance"
# What may be changed. Unloading a model comes last, after all else: it is meant to have an effect.
ADMIN = "/(repository|labels|logging|trace|systemsharedmemory|cudasharedmemory)"
RUN_SECONDS = 900.0


def run(context: Context) -> Figures:
    figures = Figures()
    models = context.folder / "models"
    good = known_requests.ask({1: attack_bundles.write_good(models / "m" / "1")}, count=8)
    operations = 0
    for words, env, chosen in (
        ("as anybody", {}, ()),
        (
            "as an administrator",
            {"DSS_ACCESS__OPEN_ADMIN": "true"},
            ("--include-path-regex", ADMIN),
        ),
    ):
        context.say(words)
        folder = context.folder / words.replace(" ", "-")
        with serving(models, folder, env=env) as server:
            figures.rss_start = figures.rss_start or server.rss()
            report = schemathesis(context, server, folder, *chosen)
            count(figures, report)
            operations += report["operations"]["tested"]
            if not chosen:
                check_good(server, good, figures)
                figures.rss_end = server.rss()
            figures.require(f"{words}: the server lives", is_running(server.process.pid))
            traces = server.log_text().count("Traceback")
            figures.require(f"{words}: no traceback in its log", not traces, traces)
    figures.facts = {"operations": operations, "seed": context.seed}
    figures.require("every check of schemathesis holds", not figures.failed, dict(figures.failed))
    figures.require_right()
    figures.require_flat_memory()
    return figures


def schemathesis(
    context: Context, server: Server, folder: Path, *arguments: str
) -> Mapping[str, Any]:
    found = folder / "report.json"
    command = [
        str(Path(sys.executable).parent / "schemathesis"), "run",
        f"http://{HOST}:{server.port}/openapi.json",
        "--phases", "examples,fuzzing" if context.quick else "examples,coverage,fuzzing",
        "--max-examples", str(context.count(3, 100)),
        "--seed", str(context.seed),
        "--checks", "all", "--exclude-checks", EXCLUDED,
        "--request-timeout", str(ANSWER_SECONDS),
        "--report", "json", "--report-json-path", str(found),
        "--continue-on-failure", "--no-color", *arguments,
    ]  # fmt: skip
    try:
        ended = subprocess.run(  # noqa: S603
            command, cwd=folder, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
        )
    except FileNotFoundError as error:
        raise NotPossible("schemathesis is not installed: make test installs it.") from error
    if not found.exists():
        raise NotPossible(f"schemathesis made no report: {(ended.stdout + ended.stderr)[-500:]}")
    report: Mapping[str, Any] = json.loads(found.read_text())
    return report


def count(figures: Figures, report: Mapping[str, Any]) -> None:
    cases = report["test_cases"]
    figures.sent += cases["generated"]
    figures.answered += cases["generated"] - cases["with_failures"] - cases["errored"]
    for failure in report["failures"]:
        figures.failed[failure["title"]] += failure["count"]
        figures.note(f"{failure['title']}: {', '.join(failure['operations'])}")
    for error in report["errors"]:
        figures.fail("error of schemathesis", str(error)[:200])
