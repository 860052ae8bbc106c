"""How a log line looks, and which levels are logged."""

import json
import logging
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from service.telemetry import logging_setup, request_ids
from service.telemetry.logging_setup import JsonLines, TextLines


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("service.x", logging.INFO, "x.py", 1, message, arguments, None)
    vars(made).update(extra)
    return made


def failure(text: str) -> logging.LogRecord:
    try:
        raise ValueError(text)
    except ValueError:
        made = record("It failed.")
        made.exc_info = sys.exc_info()
        return made


def test_a_json_line_holds_message_and_fields() -> None:
    line = json.loads(JsonLines(worker=3).format(record("%d rows", 2, rows=2, top={"7": 0.5})))
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "service.x",
        "message": "2 rows",
        "rows": 2,
        "top": {"7": 0.5},
        "worker": 3,
    }


def test_a_field_cannot_replace_what_every_line_has() -> None:
    assert json.loads(JsonLines().format(record("true", level="false")))["level"] == "info"


def test_an_exception_is_a_field_of_the_same_line() -> None:
    text = JsonLines().format(failure("two\nlines"))
    assert "\n" not in text
    assert "ValueError: two\nlines" in json.loads(text)["exception"]


@pytest.mark.parametrize("value", [b"bytes", object(), "\udcff", {1: 2}, np.float32(1), {1, 2}])
def test_whatever_is_given_can_be_written(value: object) -> None:
    for formatter in (JsonLines(), TextLines()):
        line = formatter.format(record("said %s", value, field=value))
        assert "\n" not in line and "field" in line


def test_a_request_that_is_being_handled_is_named() -> None:
    handled = request_ids.current.set("abc")
    try:
        assert json.loads(JsonLines().format(record("x")))["request_id"] == "abc"
        assert TextLines().format(record("x")).endswith(": x request_id=abc")
    finally:
        request_ids.current.reset(handled)
    assert "request_id" not in JsonLines().format(record("x"))


def test_a_text_line_shows_the_fields() -> None:
    line = TextLines().format(record("x", rows=2, timings={"gate": 0.25}, note="two words"))
    assert line.endswith('INFO service.x: x rows=2 timings.gate=0.25 note="two words"')


@pytest.mark.parametrize("character", ["\n", "\r", "\x1b", "\x00", "\u2028", "\x85", "\u202e"])
def test_no_character_breaks_a_text_line(character: str) -> None:
    line = TextLines().format(record("to %s", f"a{character}b", path=f"/{character}"))
    assert line.isprintable()
    assert len(line.splitlines()) == 1


def test_the_lines_of_a_trace_are_indented() -> None:
    first, *rest = TextLines().format(failure("x\n2026-01-01 INFO forged")).splitlines()
    assert first.endswith("It failed.")
    assert all(line.startswith("    ") for line in rest)


def test_uvicorns_colours_are_left_out() -> None:
    line = JsonLines().format(record("Started", color_message="\x1b[36mStarted"))
    assert "color" not in line


@pytest.fixture
def _levels() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.mark.usefixtures("_levels")
def test_the_level_can_be_changed() -> None:
    logger = logging.getLogger("service.x")
    for level in logging_setup.LEVELS:
        logging_setup.set_level(level)
        assert logging_setup.current().level == level
        assert logger.isEnabledFor(getattr(logging, level.upper()))
    assert not logger.isEnabledFor(logging.WARNING)
    with pytest.raises(
        logging_setup.UnknownLevel, match="must be one of debug, info, warning, error"
    ):
        logging_setup.set_level("loud")
    assert logging_setup.current().level == "error"
