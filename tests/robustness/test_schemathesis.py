"""Requests made from the server's own OpenAPI document; `make chaos` makes many more."""

from pathlib import Path

from helpers.server import Running

from benchmarks.chaos.harness.server_process import Server
from benchmarks.chaos.harness.verdict import Context, Figures
from benchmarks.chaos.scenarios import schema


def test_every_operation_keeps_to_the_document(server: Running, tmp_path: Path) -> None:
    at = Server("127.0.0.1", server.port, process=server.process, log=server.log)
    report = schema.schemathesis(Context(tmp_path, quick=True), at, tmp_path)
    figures = Figures()
    schema.count(figures, report)
    assert report["operations"]["tested"] == report["operations"]["selected"] > 10
    assert figures.sent > 50
    assert not figures.failed, figures.notes
