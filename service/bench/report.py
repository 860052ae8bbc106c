"""Measured points as a table for people and as JSON for programs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.errors import DSSError
from service.system.machine import machine

UNKNOWN = "-"
PACKAGES = ("doubly-sparse-softmax", "numpy", "numba", "onnxruntime", "uvicorn")


class ReportNotWritten(DSSError):
    pass


@dataclass(frozen=True)
class Column:
    title: str
    field: str
    format: str = ","
    scale: float = 1.0


ENGINE = (
    Column("backend", "backend", ""),
    Column("threads", "threads"),
    Column("k", "k"),
    Column("experts", "experts"),
    Column("batch", "batch"),
    Column("p50 us", "p50_us", ",.1f"),
    Column("p90 us", "p90_us", ",.1f"),
    Column("p99 us", "p99_us", ",.1f"),
    Column("mean us", "mean_us", ",.1f"),
    Column("us/row", "us_per_row", ",.2f"),
    Column("rows/s", "rows_per_second", ",.0f"),
    Column("CPU", "cpu_per_second", ".2f"),
    Column("in gate", "gate_share", ".0%"),
    Column("in experts", "expert_share", ".0%"),
    Column("in rest", "rest_share", ".0%"),
    Column("MB", "resident_bytes", ",.1f", 1e-6),
    Column("load s", "load_seconds", ".2f"),
)
HTTP = (
    Column("batch", "batch"),
    Column("concurrency", "concurrency"),
    Column("requests/s", "requests_per_second", ",.0f"),
    Column("rows/s", "rows_per_second", ",.0f"),
    Column("p50 us", "p50_us", ",.0f"),
    Column("p90 us", "p90_us", ",.0f"),
    Column("p99 us", "p99_us", ",.0f"),
    Column("errors", "errors"),
    Column("joined rows", "joined_rows", ",.1f"),
    Column("queue us", "queue_us", ",.0f"),
    Column("compute us", "compute_us", ",.0f"),
    Column("server CPU", "server_cpu_per_second", ".2f"),
    Column("server MB", "server_resident_bytes", ",.0f", 1e-6),
    Column("load CPU", "generator_cpu_per_second", ".2f"),
)


def head(columns: Sequence[Column]) -> str:
    return "  ".join(f"{column.title:>{_width(column)}}" for column in columns)


def line(columns: Sequence[Column], point: Mapping[str, Any]) -> str:
    return "  ".join(f"{_cell(column, point):>{_width(column)}}" for column in columns)


def _width(column: Column) -> int:
    return max(len(column.title), 7)


def _cell(column: Column, point: Mapping[str, Any]) -> str:
    value = point[column.field]
    if value is None:
        return UNKNOWN
    return format(value if column.scale == 1 else value * column.scale, column.format)


def remarks(point: Mapping[str, Any]) -> list[str]:
    """What a reader of an HTTP point must know, in sentences."""
    found = []
    if not point["stable"]:
        shown = ", ".join(f"{rate:,.0f}" for rate in point["window_requests_per_second"])
        found.append(f"unstable: the last windows had {shown} requests/s")
    found += point["notes"]
    if point["errors"]:
        found.append(f"{point['errors']:,} errors, the first: {point['first_error'].rstrip('.')}")
    where = f"batch {point['batch']}, concurrency {point['concurrency']}"
    return [f"{where}: {remark}." for remark in found]


def content(command: str, facts: Mapping[str, Any], points: Sequence[Any]) -> dict[str, Any]:
    return {"command": command, "machine": machine(*PACKAGES), **facts, "points": points}


def write(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise ReportNotWritten(f"{path} cannot be written.") from error
