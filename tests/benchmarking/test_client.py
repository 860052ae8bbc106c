"""The comparison of clients: it runs, and the page shows what it found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

pytest.importorskip("tritonclient.http")
from benchmarks import client
from benchmarks.engines.report import with_part

OURS = {"Client", "AsyncClient"}


def test_the_page_shows_the_committed_results() -> None:
    results = json.loads((ROOT / client.RESULTS).read_text())
    page = (ROOT / "docs" / "client.md").read_text()
    assert with_part(page, "client", client.rendered(results)) == page
    points = [point for point in results["points"] if point["client"] in OURS]
    assert {(point["rows"], point["at_once"]) for point in points} == {
        (rows, at_once) for rows in (1, 64) for at_once in (1, 16)
    }
    assert all(point["ratio"] <= 1.3 for point in points)


def test_it_runs(tmp_path: Path) -> None:
    out = tmp_path / "client.json"
    command = [sys.executable, "-m", "benchmarks.client", "--rounds", "1", "--calls", "16"]
    run = subprocess.run(
        [*command, "--rows", "2", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    points = json.loads(out.read_text())["points"]
    assert len(points) == 12
    assert {point["client"] for point in points} >= OURS
    assert all(point["us"] > 0 for point in points)
