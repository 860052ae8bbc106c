"""`dss serve` as an operator starts it, and what the system says of its processes."""

import json
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.bench import proc_stats, server
from service.bench.http_reader import HOST
from service.bench.server import ServerProcess

# The models folder is looked at more often than usual, so that a scenario need not wait.
WATCHING = {"DSS_REPOSITORY__POLL_SECONDS": "0.2"}
UNCHECKED = {"DSS_REPOSITORY__CHECK_MEMORY": "false"}  # whatever a manifest claims is looked at
POLL_SECONDS = 0.02


class NeverHappened(Exception):
    """Something that was waited for did not come about."""


@dataclass(frozen=True, kw_only=True)
class Server(ServerProcess):
    def listed(self, name: str = "m") -> dict[str, Any]:
        """What GET /models says of one model."""
        _, body = self.get("/models")
        found: list[dict[str, Any]] = [
            model for model in json.loads(body)["models"] if model["name"] == name
        ]
        return found[0] if found else {"version": None, "versions": [], "refused": []}

    def loaded(self, name: str = "m") -> set[int]:
        return {version["version"] for version in self.listed(name)["versions"]}

    def refused(self, name: str = "m") -> dict[int, str]:
        return {one["version"]: one["reason"] for one in self.listed(name)["refused"]}

    def pids(self) -> list[int]:
        return proc_stats.tree([self.process.pid])

    def stop(self, seconds: float = 30.0) -> int:
        """The exit status after SIGTERM."""
        self.process.terminate()
        return self.process.wait(seconds)

    def kill(self) -> None:
        """It and all that it started, at once."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def workers(self) -> list[int]:
        """The processes that hold connections, of a server with several."""
        return [pid for pid in self.pids()[1:] if client_ports(pid, self.port)]

    def rss(self) -> int:
        return proc_stats.usage(self.process.pid).rss_bytes

    def cpu_seconds(self) -> float:
        return proc_stats.usage(self.process.pid).cpu_seconds

    def descriptors(self) -> int:
        return sum(len(proc_stats.open_files(pid)) for pid in self.pids())

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def serving(
    models: Path,
    folder: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    tls: ssl.SSLContext | None = None,
) -> Iterator[Server]:
    """A server, ready; at the end it and all that it started are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = ("--drain-seconds", "0", *arguments)
    with server.serving(
        models, folder / "log", *arguments, env=env, prefix=prefix, tls=tls
    ) as started:
        yield Server(**vars(started))


def wait_until(condition: Callable[[], bool], words: str, seconds: float = 30.0) -> float:
    """How many seconds it took."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise NeverHappened(f"It never came about that {words}.")
        time.sleep(POLL_SECONDS)
    return time.monotonic() - begun


def until_replaced(server: Server, ended: int, workers: int) -> float:
    """Seconds until as many workers as before hold connections that they were given since."""

    def replaced() -> bool:
        with socket.create_connection((HOST, server.port)):
            found = server.workers()
            return len(found) == workers and ended not in found

    return wait_until(replaced, "a worker is replaced", 60.0)


def client_ports(pid: int, port: int) -> set[int]:
    """The other ends of the connections to a port that a process holds."""
    held = set(proc_stats.open_files(pid))
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[9]}]" in held and int(fields[1].rpartition(":")[2], 16) == port:
            found.add(int(fields[2].rpartition(":")[2], 16))
    return found
