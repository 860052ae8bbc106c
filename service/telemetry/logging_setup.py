"""Logging for a server, one line per event; `dss serve` configures it, nothing does at import.

A line holds the message and, beside it, whatever was given as `extra`, the request's name if one is
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
from service.telemetry.log_queue import LogWriter

LEVELS = ("debug", "info", "warning", "error")
TALKATIVE = ("asyncio", "numba", "urllib3")  # never say more than info

# What every record has; anything else was given as `extra`.
USUAL = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
UNWANTED = {"color_message"}  # uvicorn's message again, with escape codes

Fields = dict[str, Any]


class UnknownLevel(DSSError):
    pass


class Current(NamedTuple):
    level: str
    format: str


class Installed(NamedTuple):
    writer: LogWriter
    format: str


_installed: Installed | None = None


def configure(settings: Settings, worker: int | None = None) -> None:
    """Send everything that is logged to stderr; `worker` is the number of one of several."""
    global _installed
    remove()
    formatter = JsonLines(worker) if settings.log_format == "json" else TextLines(worker)
    writer = LogWriter(_stderr())
    writer.setFormatter(formatter)
    logging.getLogger().addHandler(writer)
    logging.captureWarnings(True)
    _installed = Installed(writer, settings.log_format)
    set_level(settings.log_level)
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.INFO)


def remove() -> None:
    """Undo `configure`, once everything is written."""
    global _installed
    if _installed is not None:
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(_installed.writer)
        _installed.writer.close()
        _installed = None


def wait() -> None:
    """Until what was logged is written; for a process that ends without saying goodbye."""
    if _installed is not None:
        _installed.writer.wait()


def count_dropped(tell: Callable[[int], None]) -> None:
    """Tell of lines that could not be written, as often as there are some."""
    if _installed is not None:
        _installed.writer.count_dropped(tell)


def set_level(name: str) -> None:
    """Log from now on only what is at least so important."""
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


def printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _fields(record: logging.LogRecord, worker: int | None) -> Fields:
    found = {
        name: value
        for name, value in vars(record).items()
        if name not in USUAL and name not in UNWANTED
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
