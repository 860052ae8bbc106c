"""What the core sends, and in which parts: no server is needed."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.client.played_core import GOOD, Play, problem, reply
from helpers.client.scripted_server import top_k

from service.client import DeadlineExceeded, NotAuthorized, QueryRefused
from service.client.core import Send
from service.client.deadline import Deadline
from service.client.http1 import Reply
from service.client.rows import PartLimits

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
    assert "within 2.5 seconds" in str(Deadline(0.0, 2.5).exceeded())
