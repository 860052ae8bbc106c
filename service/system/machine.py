"""Describes the machine on which a figure was measured."""

import platform
from importlib.metadata import version
from pathlib import Path

from service.system.cpu_quota import usable_cpus

CPU_INFO = Path("/proc/cpuinfo")


def machine(*packages: str) -> dict[str, object]:
    return {
        "cpu": _cpu_model(),
        "cores": usable_cpus(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def _cpu_model() -> str:
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
