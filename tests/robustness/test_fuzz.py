"""1,500 requests that are nearly right; `make chaos` sends 100,000."""

from pathlib import Path

import numpy as np
import pytest
from helpers.server import Running
from helpers.tiny_bundle import WIDTH

from benchmarks.chaos.harness import known_requests
from benchmarks.chaos.harness.mutations import Case, Maker
from benchmarks.chaos.harness.verdict import Context
from benchmarks.chaos.scenarios import fuzz
from benchmarks.chaos.scenarios.fuzz import Fuzzer
from service import bundle
from service.engine import Engine


def test_no_request_breaks_the_server(tmp_path: Path) -> None:
    figures = fuzz.run(Context(tmp_path, quick=True))
    assert figures.sent >= fuzz.QUICK_REQUESTS
    assert figures.answered > figures.sent / 5 and figures.refused > figures.sent / 5
    assert figures.passed, (figures.criteria, figures.notes)


def test_cases_are_the_same_each_time_and_of_every_kind() -> None:
    cases = [Maker(3, WIDTH).case(number) for number in range(400)]
    assert cases == [Maker(3, WIDTH).case(number) for number in range(400)]
    assert len({case.data for case in cases}) > 390
    assert cases != [Maker(4, WIDTH).case(number) for number in range(400)]
    assert {case.label for case in cases} == {
        "bytes",
        "fields",
        "headers",
        "heads",
        "chunks",
        "pipeline",
    }


def test_an_answer_of_another_model_is_seen(server: Running, models: Path) -> None:
    """The fuzzer is told that version 1 answers, where version 2 does."""
    fuzzer = Fuzzer(
        server.port, Maker(1, WIDTH, "tiny"), Engine(bundle.read(models / "tiny" / "1"))
    )
    for number in range(60):
        fuzzer.run(number)
    fuzzer.close()
    assert fuzzer.figures.answered > 10
    assert fuzzer.figures.wrong > 10
    assert not fuzzer.figures.failed


@pytest.mark.parametrize("kind", ["json", "npy", "v2", "v2-binary"])
def test_what_is_understood_is_what_was_sent(kind: str) -> None:
    hidden = np.arange(2 * WIDTH, dtype=np.float32).reshape(2, WIDTH)
    body, path, headers = known_requests.content(kind, hidden, 3, experts=2)
    found, k, experts = fuzz._understood(Case("", b"", 1, kind, path, headers, body))
    assert np.array_equal(found, hidden)
    assert (k, experts) == (3, 2)
