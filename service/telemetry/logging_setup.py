"""Logging for a server, one line per event; `dss serve` configures it, nothing does at import.

A line holds the message and, beside it, whatever was given as `extra`, the request's id if one is
being handled, and the worker's number if there are several.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import orjson

from service.errors import DSSError
from service.settings import Settings
from service.telemetry import request_ids
from service.telemetry.log_queue import LogQueue
from service.terminal.text import printable

LEVELS = ("debug", "info", "warning", "error")
VERBOSE = ("asyncio", "numba", "urllib3")  # never log below info

# What every record has; anything else was given as `extra`.
STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
DROPPED = {"color_message"}  # uvicorn's message again, with escape codes

Fields = dict[str, Any]


class UnknownLevel(DSSError):
    pass


class Current(NamedTuple):
    level: str
    format: str


class Installed(NamedTuple):
    queue: LogQueue
    format: str


_installed: Installed | None = None


def configure(settings: Settings, worker: int | None = None) -> None:
    """Send everything that is logged to stderr; `worker` is the number of one of several."""
    global _installed
    remove()
    formatter = JsonLines(worker) if settings.log_format == "json" else TextLines(worker)
    queue = LogQueue(_stderr())
    queue.setFormatter(formatter)
    logging.getLogger().addHandler(queue)
    logging.captureWarnings(True)
    _installed = Installed(queue, settings.log_format)
    set_level(settings.log_level)
    for name in VERBOSE:
        logging.getLogger(name).setLevel(logging.INFO)


def remove() -> None:
    """Undo `configure`, once everything is written."""
    global _installed
    if _installed is not None:
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(_installed.queue)
        _installed.queue.close()
        _installed = None


def wait() -> None:
    """Until what was logged is written; for a process that ends by `os._exit`."""
    if _installed is not None:
        _installed.queue.wait()


def count_dropped(count: Callable[[int], None]) -> None:
    """Call `count` with the number of lines dropped so far, and for each one to come."""
    if _installed is not None:
        _installed.queue.count_dropped(count)


def set_level(name: str) -> None:
    """From now on log only what has at least this level."""
    if name not in LEVELS:
        raise UnknownLevel(f"The log level must be one of {', '.join(LEVELS)}.")
    level = logging.getLevelNamesMapping()[name.upper()]
    logging.getLogger().setLevel(level)


def current() -> Current:
    level = logging.getLevelName(logging.getLogger().level).lower()
    return Current(level, "text" if _installed is None else _installed.format)


def _stderr() -> int:
    """Where lines go: nowhere, if the process was started without stderr."""
    return 2 if sys.__stderr__ is not None else os.open(os.devnull, os.O_WRONLY)


class JsonLines(logging.Formatter):
    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        line: Fields = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _fields(record, self._worker).items():
            line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(line, default=str, option=OPTIONS).decode()
        except (TypeError, ValueError):  # text that is no Unicode, such as a strange file's name
            return json.dumps(line, default=str)


OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


class TextLines(logging.Formatter):
    """One line, and for a trace some indented ones: a line that is not indented is an event.

    Characters that would break or colour a line are escaped, because clients choose some of them.
    """

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        head = f"{self.formatTime(record)} {record.levelname} {record.name}: {record.getMessage()}"
        fields = _flat(_fields(record, self._worker))
        line = printable(" ".join([head, *(f"{name}={_short(value)}" for name, value in fields)]))
        if not record.exc_info:
            return line
        trace = self.formatException(record.exc_info).splitlines()
        return "\n".join([line, *(f"    {printable(part)}" for part in trace)])


def _fields(record: logging.LogRecord, worker: int | None) -> Fields:
    found = {
        name: value
        for name, value in vars(record).items()
        if name not in STANDARD and name not in DROPPED
    }
    request_id = request_ids.current.get()
    if request_id is not None:
        found.setdefault("request_id", request_id)
    if worker is not None:
        found.setdefault("worker", worker)
    return found


def _flat(fields: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if " " in text or not text else text
