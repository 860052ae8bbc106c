"""The harness of `make chaos` itself: it sees what it is there to see."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.chaos.scripted_server import answer, right, server
from helpers.paths import ROOT

from benchmarks.chaos import __main__ as command
from benchmarks.chaos import tables
from benchmarks.chaos.harness import bundles, known_requests
from benchmarks.chaos.harness.answer_check import END, Checker, Question
from benchmarks.chaos.harness.load import Generator, Outcome, Plan
from benchmarks.chaos.harness.mutations import Maker
from benchmarks.chaos.harness.verdict import MIB, Context, Figures, NotPossible, flat
from benchmarks.chaos.scenarios import registry
from benchmarks.chaos.scenarios.fuzz import Fuzzer
from benchmarks.document import MarkersMissing
from benchmarks.engines.random_bundles import Shape
from service.bench.http_reader import (
    AnswerNotUnderstood,
    ConnectionEnded,
    NoAnswer,
    RawConnection,
    statuses,
)
from service.bundle import Bundle
from service.engine import Engine

DOCUMENT = ROOT / "docs" / "chaos.md"
RESULTS = ROOT / "benchmarks" / "results" / "chaos.json"
SHAPE = Shape(n_classes=40, n_experts=2, held=30, hidden_size=4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Bundle]:
    return bundles.write(tmp_path_factory.mktemp("chaos"), [1, 2], SHAPE)


@pytest.fixture(scope="module")
def asked(made: dict[int, Bundle]) -> list[Question]:
    return known_requests.ask(made, kinds=("json",), count=4)


def loaded(plan: Plan) -> Outcome:
    """Without another process."""
    return Generator(plan, [0, 0, 0, 0, 0]).run()


# --- answers ---------------------------------------------------------------------------------


def test_a_right_answer_of_any_version_is_right(asked: list[Question]) -> None:
    checker = Checker(asked)
    for _ in range(2):  # once read, once known
        assert checker.why_wrong(1, right(asked[1], 1)) is None
        assert checker.why_wrong(1, right(asked[1], 2)) is None


def test_an_answer_mixed_of_two_versions_is_wrong(asked: list[Question]) -> None:
    one, two = (json.loads(right(asked[1], version).partition(END)[2]) for version in (1, 2))
    assert len(one["classes"]) == 2
    for name in ("classes", "log_probs"):
        mixed = one | {name: [one[name][0], two[name][1]]}
        said = answer(json.dumps(mixed).encode())
        assert name in (Checker(asked).why_wrong(1, said) or "")


def test_answers_to_other_questions_and_of_no_version_are_wrong(asked: list[Question]) -> None:
    checker = Checker(asked)
    assert checker.why_wrong(0, right(asked[0])) is None
    assert checker.why_wrong(3, right(asked[0])) is not None
    unknown = right(asked[0]).replace(b'"version": 1', b'"version": 9')
    assert "version 9" in (checker.why_wrong(0, unknown) or "")
    assert "cannot be read" in (checker.why_wrong(0, answer(b"[]")) or "")


@pytest.mark.parametrize("kind", known_requests.KINDS)
def test_every_kind_of_answer_is_read(kind: str, made: dict[int, Bundle]) -> None:
    """As the service's own encoders write them; test_fuzz.py asks a real server."""
    hidden = np.ones((2, SHAPE.hidden_size), np.float32)
    body, path, headers = known_requests.content(kind, hidden, 3)
    request = known_requests.request(kind, hidden, 3)
    assert request.endswith(body) and path.encode() in request
    assert all(name.encode() in request for name in headers)
    assert known_requests.reply_of(Engine(made[1]), 1, hidden, 3).classes.shape == (2, 3)


# --- load ------------------------------------------------------------------------------------


def test_every_answer_is_counted_once_by_what_it_is(asked: list[Question]) -> None:
    by_request = {question.request: number for number, question in enumerate(asked)}

    def reply(request: bytes) -> bytes | None:
        number = by_request[request]
        return [right(asked[0]), right(asked[0]), answer(b"{}", 429), answer(b"{}", 500)][number]

    with server(reply) as port:
        outcome = loaded(Plan(port, asked, connections=1, rate=200, seconds=0.2))
    assert outcome.sent >= 20
    share = outcome.sent // 4
    assert outcome.answered in (share, share + 1)
    assert outcome.wrong in (share, share + 1)
    assert outcome.rejected in (share, share + 1)
    assert outcome.failed["status 500"] == outcome.sent - sum(
        (outcome.answered, outcome.wrong, outcome.rejected)
    )
    assert not outcome.lost


def test_a_connection_that_ends_loses_its_request(asked: list[Question]) -> None:
    with server(lambda _: None) as port:
        outcome = loaded(Plan(port, asked, connections=2, seconds=0.25))
    assert outcome.sent == len(outcome.lost) == sum(outcome.failed.values()) >= 4
    assert not outcome.answered


def test_silence_is_a_hang_and_not_waited_for(asked: list[Question]) -> None:
    with server(lambda _: b"") as port:
        outcome = loaded(Plan(port, asked, connections=2, seconds=0.3, patience=0.1))
    assert outcome.failed["hang"] == outcome.sent == len(outcome.lost)


def test_requests_that_could_never_be_sent_are_counted_too(asked: list[Question]) -> None:
    with server(lambda _: b"") as port:
        outcome = loaded(Plan(port, asked, connections=1, rate=200, seconds=0.3, patience=0.5))
    assert outcome.sent == 1 and len(outcome.overdue) > 10
    assert max(outcome.overdue) < 1.0


def test_new_connections_go_where_they_are_sent(asked: list[Question]) -> None:
    with server(lambda _: right(asked[0])) as here, server(lambda _: None) as elsewhere:
        plan = Plan(elsewhere, asked[:1], connections=2, seconds=0.1)
        outcome = Generator(plan, [0, 0, 0, 0, here]).run()
    assert outcome.answered > 2 and not outcome.failed


def test_an_open_loop_counts_from_when_a_request_was_due(asked: list[Question]) -> None:
    """One connection, 100 requests a second due, 20 ms an answer: each comes later."""
    gate = threading.Event()

    def reply(_: bytes) -> bytes:
        gate.wait(0.02)
        return right(asked[0])

    with server(reply) as port:
        outcome = loaded(Plan(port, asked[:1], connections=1, rate=100, seconds=0.5))
    assert outcome.answered >= 5
    assert outcome.percentile(100) > 3 * outcome.percentile(0)
    assert max(outcome.service) < outcome.percentile(100) / 1000


# --- the fuzzer ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (answer(b"{}", 500), "status 500"),
        (answer(b"{}", 503), "status 503"),
        (None, "no answer"),
        (b"what?\r\n\r\n", "not HTTP"),
    ],
)
def test_the_fuzzer_sees_failures(said: bytes | None, kind: str, made: dict[int, Bundle]) -> None:
    with server(lambda _: said) as port:
        fuzzer = Fuzzer(port, Maker(1, SHAPE.hidden_size), Engine(made[1]), seconds=0.2)
        for number in range(20):
            fuzzer.run(number)
        fuzzer.close()
    assert fuzzer.figures.failed[kind] >= 5
    assert not fuzzer.figures.answered


def test_a_connection_tells_hangs_from_ends() -> None:
    with server(lambda _: b"") as port, RawConnection(port, seconds=0.1) as connection:
        connection.send(b"x")
        with pytest.raises(NoAnswer):
            connection.answer()
    with server(lambda _: None) as port, RawConnection(port) as connection:
        connection.send(b"x")
        with pytest.raises(ConnectionEnded):
            connection.answer()
    with server(lambda _: b"SSH-2.0\r\n\r\n") as port, RawConnection(port) as connection:
        connection.send(b"x")
        with pytest.raises(AnswerNotUnderstood):
            connection.answer()
    two = answer(b"a", 100) + answer(b"b", 404)
    assert statuses(two) == [100, 404]


# --- figures and the command -----------------------------------------------------------------


def test_flat_is_five_percent_or_eight_megabytes() -> None:
    assert flat(100 * MIB, 108 * MIB) and not flat(100 * MIB, 109 * MIB)
    assert flat(1000 * MIB, 1050 * MIB) and not flat(1000 * MIB, 1051 * MIB)


def good(context: Context) -> Figures:
    figures = Figures(sent=10, answered=9, rejected=1, rss_start=MIB, rss_end=2 * MIB)
    figures.require_right()
    figures.facts = {"quick": str(context.quick)}
    return figures


def bad(context: Context) -> Figures:
    figures = good(context)
    figures.fail("status 500", "a | b")
    figures.require_none_failed()
    return figures


def broken(context: Context) -> Figures:
    raise OSError(f"not in {context.folder.parent}")


def impossible(context: Context) -> Figures:
    raise NotPossible(f"Only root can do this, {context.quick}.")


@pytest.mark.parametrize(
    ("run", "status", "passed"), [(good, 0, True), (bad, 1, False), (broken, 1, False)]
)
def test_the_command_says_and_keeps_whether_criteria_hold(
    run: Callable[[Context], Figures],
    status: int,
    passed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "chaos.json"
    monkeypatch.setattr(command, "scenario", lambda _: run)
    monkeypatch.setattr("sys.argv", ["chaos", "--quick", "--only", "kill", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == status
    results = json.loads(out.read_text())
    assert results["scenarios"]["kill"]["passed"] is passed
    assert results["machine"]["cores"] >= 1
    assert tables.render(results) in capsys.readouterr().out


def test_what_cannot_run_here_is_said_and_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "chaos.json"
    monkeypatch.setattr(command, "scenario", lambda _: impossible)
    monkeypatch.setattr("sys.argv", ["chaos", "--only", "clock", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0
    assert "Only root can do this" in tables.render(json.loads(out.read_text()))


def test_one_scenario_run_anew_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "chaos.json"
    monkeypatch.setattr(command, "scenario", lambda name: bad if name == "idle" else good)
    for name in ("slow", "idle"):
        monkeypatch.setattr("sys.argv", ["chaos", "--only", name, "--out", str(out)])
        with pytest.raises(SystemExit):
            command.main()
    results = json.loads(out.read_text())
    assert list(results["scenarios"]) == ["idle", "slow"]
    table = tables.render(results)
    assert "1 status 500" in table and "**no**" in table


def test_every_scenario_has_a_title_and_a_function() -> None:
    for name in registry.NAMES:
        assert registry.title(name) and callable(registry.scenario(name))


def test_the_document_shows_the_committed_results() -> None:
    text = DOCUMENT.read_text()
    assert tables.render(json.loads(RESULTS.read_text())) in text


def test_a_document_without_marks_is_left_alone(tmp_path: Path) -> None:
    document = tmp_path / "chaos.md"
    document.write_text("nothing")
    with pytest.raises(MarkersMissing):
        tables.update(document, json.loads(RESULTS.read_text()))
    assert document.read_text() == "nothing"
