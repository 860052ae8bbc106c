"""On what a figure was measured."""

import os
import platform
from importlib.metadata import version


def machine(*packages: str) -> dict[str, object]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
