"""Triton's switches for the log, as one level."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.errors import DSSError, NotSupported
from service.http.fields import InvalidField, UnknownField
from service.http.v2.settings import changed_level
from service.shared_state.counters import SharedCounters
from service.telemetry.log_level import LogLevel

DEBUG, INFO, WARNING, ERROR, CRITICAL = 10, 20, 30, 40, 50


@pytest.fixture(autouse=True)
def _level_stays() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


@pytest.mark.parametrize(
    ("before", "asked", "after"),
    [
        (INFO, {}, INFO),
        (INFO, {"log_info": None, "log_error": True}, INFO),
        (INFO, {"log_verbose_level": 3}, DEBUG),
        (DEBUG, {"log_verbose_level": 0}, INFO),
        (ERROR, {"log_verbose_level": 0}, ERROR),
        (DEBUG, {"log_info": False}, WARNING),
        (ERROR, {"log_info": False}, ERROR),
        (INFO, {"log_warning": False}, ERROR),
        (ERROR, {"log_warning": True}, WARNING),
        (INFO, {"log_error": False}, CRITICAL),
        (CRITICAL, {"log_info": True}, INFO),
        (INFO, {"log_info": False, "log_warning": True, "log_verbose_level": 0}, WARNING),
        (INFO, {"log_file": "", "log_format": "ISO8601"}, INFO),
    ],
)
def test_switches_choose_the_nearest_level(before: int, asked: dict[str, Any], after: int) -> None:
    assert changed_level(before, asked) == after


@pytest.mark.parametrize(
    ("asked", "failure"),
    [
        ({"log_info": True, "log_error": False}, InvalidField),
        ({"log_info": 1}, InvalidField),
        ({"log_verbose_level": True}, InvalidField),
        ({"log_verbose_level": -1}, InvalidField),
        ({"log_file": "server.log"}, NotSupported),
        ({"log_format": "default"}, NotSupported),
        ({"log_everything": True}, UnknownField),
        ({"log_everything": None}, UnknownField),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], failure: type[DSSError]) -> None:
    with pytest.raises(failure):
        changed_level(INFO, asked)


def test_workers_follow_whoever_was_told_last(tmp_path: Path) -> None:
    one, other = (LogLevel(SharedCounters(tmp_path, number)) for number in range(2))
    logging.getLogger().setLevel(INFO)
    other.follow()
    assert other.now == INFO, "no worker was told to change it"
    one.change(DEBUG)
    logging.getLogger().setLevel(INFO)  # as the other process has it
    other.follow()
    assert other.now == DEBUG
    other.change(ERROR)
    logging.getLogger().setLevel(DEBUG)
    one.follow()
    assert one.now == ERROR
