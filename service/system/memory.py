"""How much more memory this process may take before the kernel kills it or its neighbours.

Counted as free is what the kernel would give back first: pages of files that nobody used lately,
and half of those in use.
"""

from collections.abc import Iterator
from pathlib import Path

from service.system import cgroups

ROOT = cgroups.ROOT


def bytes_left(root: Path = ROOT) -> int | None:
    """The least of what the machine and each control group has left; None if nothing tells."""
    return min(_all_left(root), default=None)


def _all_left(root: Path) -> Iterator[int]:
    for line in cgroups.read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024
    for group in cgroups.folders_v2(root):
        yield from _left(group, "memory.max", "memory.current", "")
    for group in cgroups.folders_v1("memory", root):
        yield from _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _left(group: Path, limit: str, usage: str, prefix: str) -> Iterator[int]:
    try:
        most, used = int(cgroups.read(group / limit)), int(cgroups.read(group / usage))
    except ValueError:  # `max`, or no such file
        return
    lines = (line.split() for line in cgroups.read(group / "memory.stat").splitlines())
    stat = {line[0]: int(line[1]) for line in lines if len(line) == 2}
    inactive = stat.get(f"{prefix}inactive_file", 0)
    active = stat.get(f"{prefix}active_file", 0)
    yield max(0, most - used + inactive + active // 2)
