"""Tables in the documents are those that their commands render from benchmarks/results."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT

from benchmarks import summary
from benchmarks.chaos import tables as chaos_tables
from benchmarks.client import report as client_report
from benchmarks.document import with_part
from benchmarks.engines import backends, report, scaling_report
from benchmarks.engines.curves import report as curves_report
from benchmarks.engines.promises import report as promise_report
from benchmarks.http import metrics, scrapes, sizing
from benchmarks.http import tables as http_tables
from benchmarks.training import choosing_report, fidelity

RESULTS = ROOT / "benchmarks" / "results"
SUMMARY = [
    (str(document), name, body)
    for document, parts in summary.rendered(RESULTS).items()
    for name, body in parts.items()
]


def results(name: str) -> Any:  # noqa: ANN401
    return json.loads((RESULTS / f"{name}.json").read_text())


def engines() -> str:
    runs = results("engines")
    images = {title: f"images/engines-{title.lower().replace(' ', '-')}.svg" for title in runs}
    return report.markdown(runs, images)


def curves() -> str:
    runs = results("curves")
    images = {title: f"images/curves-{title.lower().replace(' ', '-')}.svg" for title in runs}
    return curves_report.markdown(runs, images)


RENDERED = [
    ("docs/performance.md", "curves", curves),
    ("docs/performance.md", "engines", engines),
    ("docs/performance.md", "http", lambda: http_tables.render(results("http"))),
    ("docs/performance.md", "backends", lambda: backends.rendered(results("backends"))),
    ("docs/performance.md", "metrics", lambda: metrics.rendered(results("metrics"))),
    ("docs/performance.md", "scrapes", lambda: scrapes.rendered(results("scrapes"))),
    (
        "docs/performance.md",
        "scaling",
        lambda: scaling_report.markdown(results("scaling"), "images/scaling.svg"),
    ),
    ("docs/chaos.md", "chaos", lambda: chaos_tables.render(results("chaos"))),
    (
        "docs/choosing.md",
        "choosing",
        lambda: choosing_report.markdown(results("choosing"), "images/choosing.svg"),
    ),
    ("docs/client.md", "client", lambda: client_report.rendered(results("client"))),
    ("docs/promises.md", "promises", lambda: promise_report.markdown(results("promises"))),
    ("docs/results.md", "fidelity", lambda: fidelity.markdown(results("fidelity"))),
    ("docs/scaling.md", "sizing", lambda: sizing.rendered(results("sizing"))),
]


@pytest.mark.parametrize(
    ("document", "name", "body"),
    [*SUMMARY, *((document, name, render()) for document, name, render in RENDERED)],
    ids=lambda value: value if len(value) < 40 else "",
)
def test_a_table_is_what_was_measured(document: str, name: str, body: str) -> None:
    text = (ROOT / document).read_text()
    assert with_part(text, name, body, document) == text


@pytest.mark.parametrize("title", results("engines"))
def test_whoever_is_compared_has_a_precision(title: str) -> None:
    run = results("engines")[title]
    shown = summary.engine_table(run).splitlines()[2:]
    for (name, point), line in zip(summary.chosen(run), shown, strict=True):
        assert name in line
        assert f"{point['precision']['1']:.3f} / {point['precision']['10']:.3f}" in line
    ratios = report.ratio_table(run)
    precision = {point["name"]: point["precision"]["1"] for point in run["contestants"]}
    for each in run["ratios"]:
        for key in ("peer", "precise_peer", "batch"):
            peer = each[f"{key}_name"]
            assert f"({peer}; precision {precision[peer]:.3f} / " in ratios


def test_servers_have_the_precision_of_their_models() -> None:
    http, engines = results("http"), results("engines")
    point = next(
        each
        for run in engines.values()
        for each in run["contestants"]
        if each.get("bundle") == "wt2-DS-64" and each["dial"] == {"experts": 1}
    )
    assert "runs/v2n/wt2-DS-64/1" in http["command"]
    assert http["model"]["precision_at_1"] == {"sparse": point["precision"]["1"], "full": 1.0}


def test_documents_name_their_command() -> None:
    page = (ROOT / summary.PAGE).read_text()
    assert "python -m benchmarks.summary" in page
    assert Path(summary.__file__).exists()
