"""`dss serve` as an operator starts it, and what the system says of its processes."""

import http.client
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

from benchmarks.http.server_process import NotServing, free_port, last_words, running, tree, weigh

ROOT = Path(__file__).parents[3]
HOST = "127.0.0.1"
# The models folder is looked at more often than usual, so that a scenario need not wait.
WATCHING = {"DSS_REPOSITORY__POLL_SECONDS": "0.2"}
START_SECONDS = 120.0  # its loops may have to be compiled
ANSWER_SECONDS = 5.0  # more is a hang
POLL_SECONDS = 0.02


class NeverHappened(Exception):
    """Something that was waited for did not come about."""


@dataclass(frozen=True)
class Server:
    port: int
    process: Popen[bytes]
    log: Path

    def get(self, path: str, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise NotServing(f"The server ended: {last_words(self.log)}")
        with suppress(OSError, http.client.HTTPException):
            return self.get("/readyz")[0] == http.HTTPStatus.OK
        return False

    def model(self, name: str = "m") -> dict[str, Any]:
        """What GET /models says of one."""
        _, body = self.get("/models")
        found: list[dict[str, Any]] = [
            model for model in json.loads(body)["models"] if model["name"] == name
        ]
        return found[0] if found else {"version": None, "versions": [], "refused": []}

    def loaded(self, name: str = "m") -> set[int]:
        return {version["version"] for version in self.model(name)["versions"]}

    def refused(self, name: str = "m") -> dict[int, str]:
        return {one["version"]: one["reason"] for one in self.model(name)["refused"]}

    def pids(self) -> list[int]:
        return tree(self.process.pid)

    def stop(self, seconds: float = 30.0) -> int:
        """The exit status after SIGTERM."""
        self.process.terminate()
        return self.process.wait(seconds)

    def workers(self) -> list[int]:
        """The processes that hold connections, of a server with several."""
        return [pid for pid in self.pids()[1:] if client_ports(pid, self.port)]

    def rss(self) -> int:
        return weigh(self.process.pid).rss_bytes

    def cpu_seconds(self) -> float:
        return weigh(self.process.pid).cpu_seconds

    def descriptors(self) -> int:
        return sum(len(descriptors(pid)) for pid in self.pids())

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def serving(
    models: Path,
    folder: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[Server]:
    """A server, ready; it and all it started are gone at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [*prefix, sys.executable, "-m", "service.cli", "serve", "--models", str(models)]
    command += ["--port", str(port), "--drain-seconds", "0", *arguments]
    inherited = [name for name in os.environ if name.startswith("DSS_")]
    if inherited:
        raise NotServing(f"Unset {', '.join(inherited)} first: a scenario sets what it needs.")
    with running(command, dict(env or {}), ROOT, folder / "log") as process:
        server = Server(port, process, folder / "log")
        try:
            wait_until(server.is_ready, "the server is ready", START_SECONDS)
        except NeverHappened as error:
            raise NotServing(f"{error} {last_words(server.log)}") from error
        yield server


def wait_until(condition: Callable[[], bool], words: str, seconds: float = 30.0) -> float:
    """How many seconds it took."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise NeverHappened(f"It never came about that {words}.")
        time.sleep(POLL_SECONDS)
    return time.monotonic() - begun


def descriptors(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.append(str(path.readlink()))
    return found


def client_ports(pid: int, port: int) -> set[int]:
    """The other ends of the connections to a port that a process holds."""
    held = set(descriptors(pid))
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[9]}]" in held and int(fields[1].rpartition(":")[2], 16) == port:
            found.add(int(fields[2].rpartition(":")[2], 16))
    return found


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
