"""When the core tries again, and what it calls a failure: no server and no sleep is needed."""

from email.utils import formatdate
from typing import Any

import pytest
from helpers.client.played_core import AWAY, FULL, GOOD, START, TIME_OF_DAY, Play, problem, reply
from helpers.client.scripted_server import answer

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
)
from service.client.core import LONGEST_PAUSE
from service.client.errors import Dropped
from service.client.http1 import Reply

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
