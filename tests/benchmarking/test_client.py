"""The comparisons of clients: they run, and the page shows what they found."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT

from benchmarks.client import report
from benchmarks.document import with_part

OURS = {"Client", "AsyncClient"}
# What would replace our connections: a transport for Client, and one for AsyncClient.
PAIRS = [("pyreqwest", "pyreqwest"), ("urllib3", "aiohttp"), ("httpx", "httpx")]
WORTH_TAKING = 1.5  # times our time per request, at most


def committed(results: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / results).read_text())
    return found


def test_the_page_shows_the_committed_results() -> None:
    results = committed(report.RESULTS)
    page = (ROOT / "docs" / "client.md").read_text()
    assert with_part(page, "client", report.rendered(results)) == page
    points = [point for point in results["points"] if point["client"] in OURS]
    assert {(point["rows"], point["at_once"]) for point in points} == {
        (rows, at_once) for rows in (1, 64) for at_once in (1, 16)
    }
    assert all(point["ratio"] <= 1.3 for point in points)


def test_the_page_shows_the_committed_results_of_transports() -> None:
    results = committed(report.TRANSPORT_RESULTS)
    page = (ROOT / "docs" / "client.md").read_text()
    assert with_part(page, "transports", report.rendered_transports(results)) == page


@pytest.mark.parametrize("pair", PAIRS)
def test_no_library_is_within_the_limit_everywhere(pair: tuple[str, str]) -> None:
    points = committed(report.TRANSPORT_RESULTS)["points"]
    wanted = set(zip(pair, ("Client", "AsyncClient"), strict=True))
    found = [point for point in points if (point["client"], point["beside"]) in wanted]
    assert {(point["rows"], point["at_once"]) for point in found} == {
        (rows, at_once) for rows in (1, 32) for at_once in (1, 16)
    }
    assert len(found) == 8
    assert max(point["ratio"] for point in found) > WORTH_TAKING


@pytest.mark.parametrize(
    ("libraries", "flags", "count"),
    [
        (("tritonclient.http",), (), 12),
        (("pyreqwest", "aiohttp", "urllib3"), ("--transports",), 16),
    ],
)
def test_it_runs(
    tmp_path: Path, libraries: tuple[str, ...], flags: tuple[str, ...], count: int
) -> None:
    for library in libraries:
        pytest.importorskip(library)
    out = tmp_path / "client.json"
    command = [sys.executable, "-m", "benchmarks.client", "--rounds", "1", "--calls", "16", *flags]
    run = subprocess.run(
        [*command, "--rows", "2", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    points = json.loads(out.read_text())["points"]
    assert len(points) == count
    assert {point["client"] for point in points} >= OURS
    assert all(point["us"] > 0 for point in points)
