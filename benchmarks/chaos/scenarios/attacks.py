"""Bundles made to attack, and paths that lead elsewhere: each is refused, the good model serves."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

from benchmarks.chaos.harness import attack_bundles, known_requests
from benchmarks.chaos.harness.attack_bundles import ATTACKS, ODD_MODELS, ODD_VERSIONS
from benchmarks.chaos.harness.load import Plan, loading
from benchmarks.chaos.harness.server_process import (
    UNCHECKED,
    WATCHING,
    NeverHappened,
    Server,
    serving,
    wait_until,
)
from benchmarks.chaos.harness.verdict import MIB, Context, Figures
from benchmarks.chaos.scenarios.fuzz import check_good
from service.bench.http_reader import RawConnection, statuses

TITLE = "bundles made to attack, paths that lead elsewhere"
SETTLE_SECONDS = 60.0
MEMORY_BYTES = 64 * MIB

TRAVERSALS = (
    "/models/../../../etc/passwd", "/../../../../etc/passwd", "/models/%2e%2e/%2e%2e/etc/passwd",
    "/models/..%2f..%2f..%2fetc%2fpasswd", "/models/..%2f..%2fetc%2fpasswd/topk", "//etc/passwd",
    "/models/%252e%252e%252fetc%252fpasswd", "/models/..%5c..%5c..%5cetc%5cpasswd",
    "/docs/../../etc/passwd", "/models/m/versions/..%2f1/topk", "/models/m/versions/%2e%2e/topk",
    "/models/m%00/topk", "/models/%00", "/models/m/versions/1%00/topk",
    "/models/m/versions/\u0661/topk", "/models/m/versions/%EF%BC%91/topk", "/models/%EF%BD%8D/topk",
    "/models/m%E2%80%8B/topk", "/models/%D0%BC/topk", "/models/%c0%ae%c0%ae/topk",
    "/v2/models/..%2f..%2fetc%2fpasswd/infer", "/v2/models/m/versions/..%2f..%2f/infer",
    "/v2/models/%2e%2e", "/v2/repository/models/..%2f..%2fetc/load",
    "/v2/repository/models/%2e%2e%2fm/unload", "/static/../../etc/passwd", "file:///etc/passwd",
    "/models/m/versions/1/../../../../../etc/passwd",
)  # fmt: skip


def run(context: Context) -> Figures:
    figures = Figures()
    models = context.folder / "models"
    made = attack_bundles.write_good(models / "m" / "1")
    good = known_requests.ask({1: made})
    with serving(models, context.folder / "run", env=WATCHING | UNCHECKED) as server:
        figures.rss_start = server.rss()
        with loading(Plan(server.port, good, connections=4, rate=200)) as load:
            load.wait_for_answers(50)
            context.say(f"{len(ATTACKS)} bundles under load")
            for number, attack in enumerate(ATTACKS):
                attack_bundles.write(attack, made, models / model_of(number) / "1")
            attack_bundles.write(ATTACKS[0], made, models / "m" / "2")
            write_odd_names(made.path, models)
            _require_refused(figures, server)
            context.say(f"{len(TRAVERSALS)} paths")
            for path in TRAVERSALS:
                try_path(figures, server, path)
            outcome = load.finish()
        outcome.counted_in(figures)
        check_good(server, good, figures)
        figures.rss_end = server.rss()
        _, listed = server.get("/models")
    figures.p50_ms, figures.p99_ms = outcome.percentile(50), outcome.percentile(99)
    served = {one["name"] for one in json.loads(listed)["models"] if one["versions"]}
    figures.require("only the good model is served", served == {"m"}, sorted(served))
    figures.require_right()
    figures.require_none_failed()
    figures.require_none_lost()
    grown = figures.rss_end - figures.rss_start
    figures.require("less than 64 MB more", grown < MEMORY_BYTES, f"{grown / MIB:.0f} MB")
    return figures


def write_odd_names(good: Path, models: Path) -> None:
    """Good bundles under names that only look like those of a model or a version."""
    for name in ODD_MODELS:
        shutil.copytree(good, models / name / "1")
    for version in ODD_VERSIONS:
        shutil.copytree(good, models / "m" / version)


def model_of(number: int) -> str:
    """Every attack has a model of its own: the reader gives up none for another."""
    return f"attack-{number:02d}"


def reasons(server: Server) -> dict[str, str]:
    """Why each attack was refused, by its name, as far as is known."""
    _, body = server.get("/models")
    models = {model["name"]: model for model in json.loads(body)["models"]}
    found = {}
    for number, attack in enumerate(ATTACKS):
        model = models.get(model_of(number))
        if model is not None:
            refused = [one["reason"] for one in model["refused"]]
            found[attack.name] = refused[0] if refused else "it is served"
    return found


def unlike(found: dict[str, str]) -> dict[str, str]:
    """The attacks that met another fate than they should have."""
    return {
        attack.name: found.get(attack.name, "never looked at")
        for attack in ATTACKS
        if attack.reason not in found.get(attack.name, "")
    }


def _require_refused(figures: Figures, server: Server) -> None:
    with suppress(NeverHappened):
        wait_until(
            lambda: len(reasons(server)) == len(ATTACKS) and 2 in server.refused(),
            "every attack is looked at",
            SETTLE_SECONDS,
        )
    others = unlike(reasons(server))
    words = f"all {len(ATTACKS)} bundles refused with their reason"
    figures.require(words, not others, others or len(ATTACKS))


def try_path(figures: Figures, server: Server, path: str) -> None:
    for method in ("GET", "POST"):
        figures.sent += 1
        with RawConnection(server.port) as connection:
            head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n"
            connection.send(
                head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n{}"
            )
            received = connection.rest()
        found = statuses(received)
        if b"root:" in received or any(status >= 500 for status in found):
            figures.fail("path", f"{method} {path}: {received[:100]!r}")
        else:
            figures.refused += 1
