"""Which processes serve: the supervisor writes the table to a file, workers read it."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "workers.json"


@dataclass(frozen=True)
class WorkerTable:
    workers: Mapping[int, int] = field(default_factory=dict)  # number -> process id, if alive
    supervisor: int | None = None  # its process id
    fork_server: int | None = None  # its process id
    restarts: int = 0
    ended_cpu_seconds: float = 0.0  # of workers that have ended

    def write(self, folder: Path) -> None:
        unfinished = folder / f"{FILE}.new"
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.rename(folder / FILE)


def read(folder: Path) -> WorkerTable:
    content = json.loads((folder / FILE).read_text())
    workers = {int(number): process for number, process in content.pop("workers").items()}
    return WorkerTable(workers, **content)


def single_process() -> WorkerTable:
    """The table of a server that is one process."""
    return WorkerTable({0: os.getpid()})
