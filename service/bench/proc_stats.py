"""What processes of this machine use, read from /proc; unknown where there is none."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTENING = "0A"
ZOMBIE = "Z"  # it has ended, and its parent has not asked for its status


@dataclass(frozen=True)
class Usage:
    """What some processes have used so far, and hold now."""

    cpu_seconds: float
    rss_bytes: int  # pages shared by two processes count twice
    pss_bytes: int  # and here once
    processes: int


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
    return sorted(tree([pid for pid in _pids() if sockets & set(open_files(pid))]))


def tree(roots: Iterable[int]) -> list[int]:
    """Processes and all that descend from them."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        for text in _read([pid], "stat"):
            children.setdefault(int(_stat(text)[1]), []).append(pid)
    found = list(dict.fromkeys(roots))
    for pid in found:  # grows while it is walked
        found += [child for child in children.get(pid, []) if child not in found]
    return found


def usage(root: int) -> Usage:
    """Of a process and all that descend from it."""
    pids = tree([root])
    sizes = memory(pids)
    return Usage(
        cpu_seconds=cpu_seconds(pids) or 0.0,
        rss_bytes=sum(size["Rss"] for size in sizes),
        pss_bytes=sum(size["Pss"] for size in sizes),
        processes=len(sizes),
    )


def memory(pids: Iterable[int]) -> list[dict[str, int]]:
    """Of each process, bytes by the names of smaps_rollup: Rss, Pss and more."""
    return [_sizes(text) for text in _read(pids, "smaps_rollup")]


def open_files(pid: int) -> list[str]:
    """What a process has open, as /proc names it; nothing once it has ended."""
    found = []
    with suppress(OSError):
        for path in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                found.append(str(path.readlink()))
    return found


def is_running(pid: int) -> bool:
    return any(_stat(text)[0] != ZOMBIE for text in _read([pid], "stat"))


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


def _read(pids: Iterable[int], name: str) -> Iterator[str]:
    for pid in pids:
        with suppress(OSError):  # it has ended
            yield (PROC / str(pid) / name).read_text()


def _stat(text: str) -> list[str]:
    """The fields after the command's name, which may hold anything."""
    return re.sub(r"^.*\) ", "", text, flags=re.DOTALL).split()


def _sizes(text: str) -> dict[str, int]:
    """Bytes by the names of smaps_rollup."""
    fields = (line.partition(":") for line in text.splitlines()[1:])
    return {name: int(size.split()[0]) * 1024 for name, _, size in fields}
