"""Requests made from the server's own OpenAPI document; `make chaos` makes many more."""

from pathlib import Path

from server import Running

from benchmarks.chaos import schema
from benchmarks.chaos.figures import Context, Figures
from benchmarks.chaos.serving import Server


def test_every_operation_keeps_to_the_document(server: Running, tmp_path: Path) -> None:
    at = Server(server.port, server.process, server.log)
    report = schema.schemathesis(Context(tmp_path, quick=True), at, tmp_path)
    figures = Figures()
    schema.count(figures, report)
    assert report["operations"]["tested"] == report["operations"]["selected"] > 10
    assert figures.sent > 50
    assert not figures.failed, figures.notes
