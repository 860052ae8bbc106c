"""Groups of workers for tests, and what can be seen of their processes."""

import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from helpers.process_stats import descriptors
from helpers.server import Running, running
from helpers.tiny_bundle import rows_for

from service.bench.proc_stats import is_running as alive
from service.shared_state import worker_table
from service.shared_state.counters import SharedCounters
from service.shared_state.worker_table import WorkerTable

__all__ = [
    "TOPK",
    "Group",
    "alive",
    "ask",
    "children",
    "cpu_ticks",
    "descriptors",
    "group",
    "limit_descriptors",
]

TOPK = {"inputs": rows_for(0, 1).tolist(), "k": 1}


@dataclass(frozen=True)
class Group:
    server: Running
    folder: Path  # where its workers' counts are

    @property
    def table(self) -> WorkerTable:
        return worker_table.read(self.folder)

    def answered(self, route: str = "/topk", method: str = "POST") -> dict[int, int]:
        """Good answers by each worker that has given any."""
        key = ("http", route, method, "200")
        reader = SharedCounters(self.folder, 99)
        return {block.worker: int(block.values[1:].sum()) for block in reader.blocks(key)}

    def total(self) -> float:
        """The same as /metrics has it, whichever worker is asked."""
        totals = set()
        for _ in self.table.workers:  # each connection is another worker's
            text = httpx.get(self.server.url + "/metrics").text
            line = 'dss_http_requests_total{method="POST",route="/topk",status="200"} '
            totals |= {float(found[len(line) :]) for found in text.splitlines() if line in found}
        (total,) = totals
        return total


@contextmanager
def group(
    models: Path,
    folder: Path,
    *arguments: str,
    workers: int = 2,
    env: Mapping[str, str] | None = None,
    inside: Sequence[str] = (),
) -> Iterator[Group]:
    arguments = ("--workers", str(workers), "--default-model", "tiny", *arguments)
    environment = {"DSS_WORKERS_FOLDER": str(folder), **(env or {})}
    with running(models, folder / "log", *arguments, env=environment, inside=inside) as server:
        (shared,) = folder.glob("dss-*")
        yield Group(server, shared)


def ask(group: Group, connections: int, times: int = 1) -> None:
    """Good requests, on connections that are all open at once."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(httpx.Client(base_url=group.server.url, timeout=30))
            for _ in range(connections)
        ]
        for _ in range(times):
            for client in clients:
                assert client.post("/topk", json=TOPK).status_code == 200


def limit_descriptors(process: int, most: int) -> None:
    _, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
    resource.prlimit(process, resource.RLIMIT_NOFILE, (most, hard))


def cpu_ticks(process: int) -> int:
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])


def children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]
