"""What processes of this machine use, read from /proc; unknown where there is none."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
LISTENING = "0A"


def resident_bytes(pids: Iterable[int]) -> int | None:
    """What they have in memory; a page that several share is counted for each."""
    pages = [int(text.split()[1]) for text in _read(pids, "statm")]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") if pages else None


def cpu_seconds(pids: Iterable[int]) -> float | None:
    ticks = [_stat(text)[11:13] for text in _read(pids, "stat")]
    if not ticks:
        return None
    return sum(int(user) + int(system) for user, system in ticks) / os.sysconf("SC_CLK_TCK")


def serving(port: int) -> list[int]:
    """The processes that listen on a port, and their children; none if they are another user's."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    found = {pid for pid in _pids() if sockets & set(_open_files(pid))} if sockets else set()
    parents = {pid: int(_stat(text)[1]) for pid in _pids() for text in _read([pid], "stat")}
    children = {pid for pid in parents if _descends(pid, found, parents)}
    return sorted(found | children)


def _descends(pid: int, ancestors: set[int], parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid in ancestors:
            return True
    return False


def _listening(port: int) -> Iterator[str]:
    """The inodes of listening sockets."""
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (PROC / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _pids() -> list[int]:
    if not PROC.is_dir():
        return []
    return [int(path.name) for path in PROC.iterdir() if path.name.isdecimal()]


def _open_files(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for path in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                yield str(path.readlink())


def _read(pids: Iterable[int], name: str) -> Iterator[str]:
    for pid in pids:
        with suppress(OSError):  # it has ended
            yield (PROC / str(pid) / name).read_text()


def _stat(text: str) -> list[str]:
    """The fields after the command's name, which may hold anything."""
    return re.sub(r"^.*\) ", "", text, flags=re.DOTALL).split()
