"""On what a figure was measured."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


def machine(*packages: str) -> dict[str, object]:
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def cores() -> int:
    """Those this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
