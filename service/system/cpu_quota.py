"""How many CPUs this process may use: its container's limit, not what the machine has.

A container sees all CPUs of its host, but the kernel stops it for the rest of a period once it has
used up its share. Threads beyond that share only take turns being stopped.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from service.system import cgroups

ROOT = cgroups.ROOT


def allowed(root: Path = ROOT, present: int | None = None) -> float:
    """How many CPUs' time may be used, perhaps a fraction: the smallest of all limits.

    `present` is the number of CPUs that the process may run on at all.
    """
    cpus = usable_cpus() if present is None else present
    return min([float(cpus), *quotas(root)])


def whole_cpus(root: Path = ROOT, present: int | None = None) -> int:
    """The same in whole CPUs, at least one."""
    return max(1, int(allowed(root, present)))


def threads_per_worker(workers: int, root: Path = ROOT, present: int | None = None) -> int:
    """Threads for each of several workers, at least one."""
    return max(1, int(allowed(root, present) / workers))


def summary(workers: int, threads: int | None) -> str:
    """For the log: the CPUs available, and the threads that each worker takes."""
    taken = threads_per_worker(workers) if threads is None else threads
    return f"{allowed():g} CPUs for {workers} workers; ONNX Runtime takes {taken} threads in each."


def quotas(root: Path = ROOT) -> Iterator[float]:
    """Every limit on this process's control groups and on the groups that they are in."""
    yield from filter(None, map(_quota_v2, cgroups.folders_v2(root)))
    yield from filter(None, map(_quota_v1, cgroups.folders_v1("cpu", root)))


def _quota_v2(group: Path) -> float | None:
    """`cpu.max` is `max 100000` or `150000 100000`: microseconds of each period."""
    words = cgroups.read(group / "cpu.max").split()
    return _ratio(words[0], words[1]) if len(words) == 2 else None


def _quota_v1(group: Path) -> float | None:
    return _ratio(
        cgroups.read(group / "cpu.cfs_quota_us"), cgroups.read(group / "cpu.cfs_period_us")
    )


def _ratio(quota: str, period: str) -> float | None:
    try:
        used, of = int(quota), int(period)
    except ValueError:  # `max`, or no such file
        return None
    return used / of if used > 0 and of > 0 else None


def usable_cpus() -> int:
    """The CPUs that this process may run on, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
