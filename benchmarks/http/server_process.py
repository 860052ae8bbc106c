"""A server in a process of its own: started, waited for, weighed and stopped. Linux only."""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
STOP_SECONDS = 15.0
LONGEST_WORDS = 200


class NotServing(Exception):
    """A server that cannot be installed, does not start or answers wrongly; the text says why."""


@dataclass(frozen=True)
class Weight:
    """What a tree of processes has used so far, and holds now."""

    cpu_seconds: float
    rss_bytes: int  # pages shared by two processes count twice
    pss_bytes: int  # and here once
    processes: int


@contextmanager
def running(
    command: Sequence[str | Path], environment: Mapping[str, str], folder: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """The process, until the end of the block; then it and all it started are gone."""
    with log.open("wb") as stream:
        process = subprocess.Popen(  # noqa: S603
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=os.environ | environment,
            cwd=folder,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    started = tree(process.pid)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    for pid in {*started, *tree(process.pid)}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def last_words(log: Path) -> str:
    """The end of what a server said, without the folders of this machine."""
    lines = log.read_text(errors="replace").strip().splitlines()
    said = lines[-1] if lines else "nothing"
    return re.sub(r"(/[\w.+-]+)+/", "", said)[-LONGEST_WORDS:]


def tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                parent = int(_stat(int(folder.name))[1])
                children.setdefault(parent, []).append(int(folder.name))
    found = [root]
    for pid in found:  # grows while it is walked
        found += children.get(pid, [])
    return found


def weigh(root: int) -> Weight:
    cpu_seconds, rss, pss, processes = 0.0, 0, 0, 0
    for pid in tree(root):
        with suppress(OSError):
            fields = _stat(pid)
            cpu_seconds += (int(fields[11]) + int(fields[12])) / TICKS
            sizes = _memory(pid)
            rss += sizes["Rss"]
            pss += sizes["Pss"]
            processes += 1
    return Weight(cpu_seconds, rss, pss, processes)


def _stat(pid: int) -> list[str]:
    """From the state on; the name before it may hold anything."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _memory(pid: int) -> dict[str, int]:
    lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
    return {
        name: int(size.split()[0]) * 1024 for name, _, size in (x.partition(":") for x in lines)
    }


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
