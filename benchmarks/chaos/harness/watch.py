"""Watches a server during an attack: its memory, /livez, and clients that it keeps waiting for."""

import http.client
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Protocol

from benchmarks.chaos.harness.attackers import SOURCE_HEX
from benchmarks.chaos.harness.load import client_context
from benchmarks.chaos.harness.verdict import MIB
from service.bench import proc_stats
from service.bench.http_reader import HOST

# A server that takes this much more than when idle has failed; it is ended before the machine is.
TOO_MUCH_BYTES = 2048 * MIB
SAMPLE_SECONDS = 0.05
LIVEZ_SECONDS = 1.0


class Target(Protocol):
    """A server: the one under test, or a test's own."""

    @property
    def port(self) -> int: ...
    def pids(self) -> list[int]: ...
    def kill(self) -> None: ...


@dataclass
class Watch:
    """The server's memory, its answers to /livez, and the attackers that it holds on to."""

    server: Target
    idle: int
    ca: Path | None
    livez_seconds: float  # within which it must be answered
    most_bytes: int = 0
    livez_late: int = 0
    killed: threading.Event = field(default_factory=threading.Event)
    last_held: dict[int, float] = field(default_factory=dict)  # by the attacker's port
    _stop: threading.Event = field(default_factory=threading.Event)

    def sample(self) -> None:
        pids = self.server.pids()
        while not self._stop.wait(SAMPLE_SECONDS):
            self.most_bytes = max(self.most_bytes, proc_stats.resident_bytes(pids) or 0)
            if self.most_bytes > self.idle + TOO_MUCH_BYTES:
                self.server.kill()
                self.killed.set()
                return
            now = monotonic()
            self.last_held |= dict.fromkeys(held_ports(self.server.port), now)

    def probe(self) -> None:
        while not self._stop.wait(LIVEZ_SECONDS):
            if not lives(self.server.port, self.livez_seconds, self.ca):
                self.livez_late += 1

    def held_longest(self, unread: Sequence[tuple[int, float]]) -> float | None:
        """Since a client had the beginning of an answer that it never read."""
        held = [self.last_held.get(port, since) - since for port, since in unread]
        return max(held, default=None)

    def stop(self) -> None:
        self._stop.set()


@contextmanager
def watching(
    server: Target, idle: int, ca: Path | None = None, livez_seconds: float = LIVEZ_SECONDS
) -> Iterator[Watch]:
    watch = Watch(server, idle, ca, livez_seconds, most_bytes=idle)
    threads = [threading.Thread(target=each, daemon=True) for each in (watch.sample, watch.probe)]
    for thread in threads:
        thread.start()
    try:
        yield watch
    finally:
        watch.stop()
        for thread in threads:
            thread.join()


def held_ports(port: int) -> set[int]:
    """The attackers' ends of connections that a process holds open at a port."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        address, _, theirs = fields[2].partition(":")
        ours = int(fields[1].rpartition(":")[2], 16)
        if address == SOURCE_HEX and ours == port and fields[9] != "0":
            found.add(int(theirs, 16))
    return found


def lives(port: int, seconds: float, ca: Path | None = None) -> bool:
    if ca is None:
        connection = http.client.HTTPConnection(HOST, port, timeout=seconds)
    else:
        connection = http.client.HTTPSConnection(
            HOST, port, timeout=seconds, context=client_context(ca)
        )
    try:
        connection.request("GET", "/livez")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def resident(server: Target) -> int:
    return proc_stats.resident_bytes(server.pids()) or 0
