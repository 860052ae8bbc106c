"""What both clients do, step by step: no server, no socket and no sleep is needed."""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any

import numpy as np
import pytest
from helpers.scripted_server import answer, top_k

from service.client import (
    AnswerMalformed,
    ClientError,
    DeadlineExceeded,
    ModelNotFound,
    NotAuthorized,
    Overloaded,
    QueryRefused,
    ServerFailed,
    Unavailable,
    WrongAddress,
    http1,
)
from service.client.core import LONGEST_PAUSE, Clock, Core, Pause, Send, Steps
from service.client.errors import Dropped
from service.client.http1 import Deadline, Reply, ReplyReader
from service.client.rows import PartLimits

ROW = np.ones((1, 4), np.float32)
START = 1000.0
TIME_OF_DAY = 1_800_000_000.0


def reply(raw: bytes) -> Reply:
    read = ReplyReader().feed(raw)
    assert read is not None
    return read


def problem(status: int, slug: str = "", detail: str = "No.", **headers: str) -> Reply:
    kind = f"urn:dss:problem:{slug}" if slug else "about:blank"
    body = b'{"type": "%b", "title": "T", "detail": "%b"}' % (kind.encode(), detail.encode())
    return reply(answer(status, body, content_type="application/problem+json", **headers))


GOOD = reply(top_k())
FULL = problem(429, "queue-full", retry_after="1")
AWAY = Unavailable("No server answers.")


@dataclass
class Play:
    """Takes a core's steps: sends are answered from a list, pauses pass at once."""

    outcomes: Iterable[Reply | ClientError | Callable[[Send], Reply]] = ()
    chance: float = 1.0
    seconds_for_a_reply: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    now: float = START
    sends: list[Send] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        clock = Clock(lambda: self.now, lambda: TIME_OF_DAY, lambda: self.chance)
        address = http1.address("http://host:8000")
        self.core = Core(address, clock=clock, **self.settings)
        self._outcomes = iter(self.outcomes)

    def topk(self, hidden: Any = ROW, k: int | None = 2, **more: Any) -> Any:  # noqa: ANN401
        given = {"experts": 1, "model": None, "version": None, "labels": False, "timeout": None}
        return self.run(self.core.topk(hidden, k, **{**given, **more}))

    def run(self, steps: Steps[Any]) -> Any:  # noqa: ANN401
        outcome: Any = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as done:
                return done.value
            if isinstance(step, Send):
                self.sends.append(step)
                self.now += self.seconds_for_a_reply
                outcome = next(self._outcomes)
                if callable(outcome):
                    outcome = outcome(step)
            elif isinstance(step, Pause):
                self.pauses.append(step.seconds)
                self.now += step.seconds
                outcome = None
            else:
                outcome = [self.run(part) for part in step.parts]

    def heads(self) -> list[str]:
        return [send.message.partition(b"\r\n\r\n")[0].decode() for send in self.sends]

    def timeouts(self) -> list[str]:
        lines = [line for head in self.heads() for line in head.split("\r\n")]
        return [line.partition(": ")[2] for line in lines if line.startswith("DSS-Timeout")]


# --- trying again ----------------------------------------------------------------------------


def test_a_good_reply_is_taken_at_once() -> None:
    play = Play([GOOD])
    found = play.topk()
    assert found.classes.tolist() == [[0, 1]]
    assert (found.model, found.version) == ("scripted", 1)
    assert (len(play.sends), play.pauses) == (1, [])


def test_full_queues_are_left_alone_for_as_long_as_they_ask_and_a_share_of_chance() -> None:
    play = Play([FULL, FULL, FULL, GOOD], chance=0.5)
    play.topk()
    assert play.pauses == pytest.approx([1.1, 1.2, 1.4])  # doubling, half of it by chance


def test_without_retry_after_a_pause_is_any_share_of_what_doubles() -> None:
    play = Play([AWAY] * 6 + [GOOD], settings={"retries": 9, "timeout": 100.0})
    play.topk()
    assert play.pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_PAUSE])
    lucky = Play([AWAY] * 3 + [GOOD], chance=0.0)
    lucky.topk()
    assert lucky.pauses == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("3", 3.0),
        (formatdate(TIME_OF_DAY + 4, usegmt=True), 4.0),
        (formatdate(TIME_OF_DAY - 9, usegmt=True), 0.0),
        ("soon", 0.0),
        ("", 0.0),
        ("-1", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str, seconds: float) -> None:
    play = Play([problem(503, retry_after=value), GOOD], chance=0.0)
    play.topk()
    assert play.pauses == pytest.approx([seconds])


@pytest.mark.parametrize(
    ("outcome", "kind"), [(FULL, Overloaded), (problem(503), Unavailable), (AWAY, Unavailable)]
)
def test_after_the_last_try_the_failure_is_told(outcome: Any, kind: type[ClientError]) -> None:  # noqa: ANN401
    play = Play([outcome] * 3, settings={"retries": 2})
    with pytest.raises(kind) as failure:
        play.topk()
    assert (len(play.sends), len(play.pauses), failure.value.tries) == (3, 2, 3)


def test_nobody_pauses_beyond_the_deadline() -> None:
    play = Play([problem(429, retry_after="60")])
    with pytest.raises(Overloaded):
        play.topk()
    assert play.pauses == []
    slow = Play([AWAY] * 9, settings={"retries": 9, "timeout": 2.0})
    with pytest.raises(Unavailable):
        slow.topk()
    assert slow.now < START + 2.0


def test_a_deadline_is_over_all_tries_and_the_server_is_told_what_is_left() -> None:
    outcomes = [FULL, FULL, GOOD]
    play = Play(outcomes, chance=0.0, seconds_for_a_reply=2.0, settings={"timeout": 9.0})
    play.topk()
    assert play.timeouts() == ["9", "6", "3"]
    assert {send.deadline.at for send in play.sends} == {START + 9.0}


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(10.0, "10"), (0.25, "0.25"), (0.1234, "0.13"), (123.0, "130"), (2000.0, "2000")],
)
def test_the_server_is_never_told_less_time_than_there_is(seconds: float, said: str) -> None:
    for late in (0.0, 1e-5):  # what a call itself takes must not change its head
        play = Play([GOOD])
        times = iter((START, START, START + late))
        play.core._clock.monotonic = times.__next__
        play.topk(timeout=seconds)
        assert play.timeouts() == [said]


@pytest.mark.parametrize(
    "failure", [problem(422), problem(500), problem(404, "model-not-found"), problem(504)]
)
def test_what_would_fail_again_is_not_tried_again(failure: Reply) -> None:
    play = Play([failure])
    with pytest.raises(ClientError):
        play.topk()
    assert len(play.sends) == 1


def test_an_idle_connection_that_was_closed_is_no_failure() -> None:
    gone = Dropped("Gone.", reused=True)
    play = Play([gone, GOOD], settings={"retries": 0})
    play.topk()
    assert [send.fresh for send in play.sends] == [False, True]
    assert play.pauses == []


def test_a_new_connection_that_is_dropped_is_tried_again_after_a_pause() -> None:
    play = Play([Dropped("Gone.", reused=False), GOOD])
    play.topk()
    assert len(play.pauses) == 1


def test_ready_is_asked_once() -> None:
    for outcome in (AWAY, problem(503), DeadlineExceeded("Late.")):
        play = Play([outcome])
        assert play.run(play.core.ready(None)) is False
    play = Play([Dropped("Gone.", reused=True), reply(answer(200, b"{}"))])
    assert play.run(play.core.ready(None)) is True
    with pytest.raises(WrongAddress):
        play = Play([problem(404)])
        play.run(play.core.ready(None))


# --- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "kind", "sentence"),
    [
        (problem(400, "malformed-npy"), QueryRefused, "No."),
        (problem(401, "unauthorized"), NotAuthorized, "api_key="),
        (problem(403, "forbidden"), NotAuthorized, "No."),
        (problem(404, "model-not-found"), ModelNotFound, "No."),
        (problem(404, "version-not-found"), ModelNotFound, "No."),
        (problem(404), WrongAddress, "no such path"),
        (problem(408), DeadlineExceeded, "No."),
        (problem(413, "too-many-rows"), QueryRefused, "No."),
        (problem(422, "wrong-width"), QueryRefused, "No."),
        (problem(429), Overloaded, "No."),
        (problem(500), ServerFailed, "No."),
        (problem(502), Unavailable, "No."),
        (problem(503), Unavailable, "No."),
        (problem(504), DeadlineExceeded, "No."),
        (problem(599), ServerFailed, "No."),
        (reply(answer(308, location="https://host/")), WrongAddress, "https://host/"),
        (reply(answer(503, b"<html>")), Unavailable, "status 503 (Service Unavailable)"),
        (reply(answer(503, b"[1]")), Unavailable, "status 503"),
        (reply(answer(418, b'{"detail": 3}')), QueryRefused, "status 418"),
        (reply(answer(204)), AnswerMalformed, "status 204"),
    ],
)
def test_a_status_is_a_named_failure(
    outcome: Reply, kind: type[ClientError], sentence: str
) -> None:
    with pytest.raises(kind) as failure:
        Play([outcome], settings={"retries": 0}).topk()
    assert sentence in str(failure.value)
    assert str(failure.value).endswith(".")
    assert failure.value.status == outcome.status


def test_a_failure_has_all_that_the_server_said() -> None:
    outcome = problem(422, "wrong-width", "Too wide.", x_request_id="abc-1")
    with pytest.raises(QueryRefused) as failure:
        Play([outcome]).topk()
    found = failure.value
    assert (found.type, found.title, found.detail) == (
        "urn:dss:problem:wrong-width",
        "T",
        "Too wide.",
    )
    assert (found.status, found.request_id, found.tries) == (422, "abc-1", 1)


def test_a_key_that_is_not_known_is_told_from_none() -> None:
    outcome = problem(401, "unauthorized")
    with pytest.raises(NotAuthorized, match="does not know this API key"):
        Play([outcome], settings={"api_key": "k" * 20}).topk()


# --- what is sent ----------------------------------------------------------------------------


USUAL = "k=2&experts=1"


@pytest.mark.parametrize(
    ("client", "call", "path", "counts"),
    [
        ({}, {}, "/topk", USUAL),
        ({}, {"k": None}, "/topk", "experts=1"),
        ({}, {"k": np.int64(7), "experts": 2}, "/topk", "k=7&experts=2"),
        ({"model": "a"}, {}, "/models/a/topk", USUAL),
        ({"model": "a", "version": 3}, {}, "/models/a/versions/3/topk", USUAL),
        ({"model": "a", "version": 3}, {"version": "x"}, "/models/a/versions/x/topk", USUAL),
        ({"model": "a", "version": 3}, {"model": "b"}, "/models/b/topk", USUAL),
        ({}, {"model": "a /", "version": "é"}, "/models/a%20%2F/versions/%C3%A9/topk", USUAL),
    ],
)
def test_the_path_names_model_version_k_and_experts(
    client: dict[str, Any], call: dict[str, Any], path: str, counts: str
) -> None:
    play = Play([GOOD], settings=client)
    play.topk(**call)
    assert play.heads()[0].startswith(f"POST {path}?{counts} HTTP/1.1\r\nHost: host:8000\r\n")


def test_a_key_comes_from_the_argument_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(**settings: str) -> list[str]:
        play = Play([GOOD], settings=settings)
        play.topk()
        return [line for line in play.heads()[0].split("\r\n") if line.startswith("Auth")]

    monkeypatch.delenv("DSS_API_KEY", raising=False)
    assert line() == []
    monkeypatch.setenv("DSS_API_KEY", "from-the-environment\n")  # as files have it
    assert line() == ["Authorization: Bearer from-the-environment"]
    assert line(api_key="given") == ["Authorization: Bearer given"]
    with pytest.raises(NotAuthorized, match="cannot carry"):
        line(api_key="two\r\nlines: of it")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ({"hidden": 3.0}, "0 dimensions"),
        ({"hidden": np.zeros((2, 3, 4))}, "3 dimensions.*reshape"),
        ({"hidden": np.zeros((0, 4))}, "nothing to ask"),
        ({"hidden": []}, "nothing to ask"),
        ({"hidden": [[1, 2], [3]]}, "cannot be read"),
        ({"hidden": [["a"]]}, "must hold numbers"),
        ({"hidden": np.zeros((1, 4), complex)}, "must hold numbers"),
        ({"k": 0}, "k is 0"),
        ({"k": 1.5}, "whole number"),
        ({"experts": 0}, "experts is 0"),
        ({"version": 2}, "model= as well"),
        ({"timeout": 0.0}, "timeout is 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"timeout": float("inf")}, "timeout is inf"),
    ],
)
def test_what_cannot_be_right_is_never_sent(call: dict[str, Any], sentence: str) -> None:
    play = Play([])
    with pytest.raises(QueryRefused, match=sentence) as failure:
        play.topk(**call)
    assert (play.sends, failure.value.status) == ([], None)


@pytest.mark.parametrize(
    "settings", [{"version": 1}, {"timeout": -1.0}, {"retries": -1}, {"retries": 1.5}]
)
def test_settings_that_cannot_be_right_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(QueryRefused):
        Play([], settings=settings)


# --- parts -----------------------------------------------------------------------------------


def obeying(rows: int, slug: str = "too-many-rows") -> Callable[[Send], Reply]:
    """A server that takes so many rows at once."""

    def answered(send: Send) -> Reply:
        asked = np.load(io.BytesIO(send.message.partition(b"\r\n\r\n")[2]))
        if len(asked) > rows:
            return problem(413, slug)
        return reply(top_k(len(asked), version=7))

    return answered


def many(rows: int) -> np.ndarray[Any, Any]:
    return np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)


@pytest.mark.parametrize("slug", ["too-many-rows", "too-many-answers", "body-too-large", ""])
def test_parts_become_as_small_as_the_server_wants_and_stay_so(slug: str) -> None:
    play = Play([obeying(300, slug)] * 99)
    assert len(play.topk(many(1000)).classes) == 1000
    assert len(play.sends) == 2 + 4  # 1000 and 500 are refused, 250 are taken
    play.topk(many(1000))
    assert len(play.sends) == 6 + 4


def test_one_row_that_is_too_large_is_a_failure() -> None:
    with pytest.raises(QueryRefused):
        Play([problem(413, "body-too-large")]).topk()


def test_parts_ask_the_version_that_answered_the_first() -> None:
    play = Play([obeying(9999)] * 3)
    found = play.topk(many(9000), version="stable", model="scripted")
    assert len(found.classes) == 9000
    assert [head.split()[1].partition("?")[0] for head in play.heads()] == [
        "/models/scripted/versions/stable/topk",
        "/models/scripted/versions/7/topk",
        "/models/scripted/versions/7/topk",
    ]


def test_parts_keep_within_rows_bytes_and_answers() -> None:
    limits = PartLimits(rows=100, body_bytes=128 + 50 * 16, answers=80)
    sizes = {len(part) for part in limits.split(many(1000), 1)}
    assert sizes == {50}
    assert max(len(part) for part in limits.split(many(1000), 4)) == 20
    assert {len(part) for part in limits.split(many(3), 1000)} == {1}
    whole = many(1000)
    np.testing.assert_array_equal(np.concatenate(limits.split(whole, 3)), whole)


def test_parts_have_one_deadline_together() -> None:
    play = Play([obeying(9999)] * 3, seconds_for_a_reply=4.0)
    with pytest.raises(DeadlineExceeded, match="10 seconds"):
        play.topk(many(13_000))
    assert play.timeouts() == ["10", "6", "2"]


def test_a_deadline_says_how_long_it_was() -> None:
    assert "within 2.5 seconds" in str(Deadline(0.0, 2.5).is_over())
