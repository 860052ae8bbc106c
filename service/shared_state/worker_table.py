"""Who serves: what the supervisor of several workers tells them, in a file of their folder."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "roster.json"


@dataclass(frozen=True)
class WorkerTable:
    workers: Mapping[int, int] = field(default_factory=dict)  # number -> process id, if alive
    supervisor: int | None = None  # its process id
    nursery: int | None = None  # the one of the process that workers are forked from
    restarts: int = 0
    ended_cpu_seconds: float = 0.0  # of workers that have died

    def write(self, folder: Path) -> None:
        unfinished = folder / f"{FILE}.new"
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.rename(folder / FILE)


def read(folder: Path) -> WorkerTable:
    told = json.loads((folder / FILE).read_text())
    workers = {int(number): process for number, process in told.pop("workers").items()}
    return WorkerTable(workers, **told)


def alone() -> WorkerTable:
    """Of a server that is one process."""
    return WorkerTable({0: os.getpid()})
