"""Prints how much memory loading a bundle takes at its peak: `load_peak.py BUNDLE BACKEND`.

A process of its own, because a peak cannot be told from what other tests have left.
"""

import ctypes
import gc
import os
import sys
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from service.batching.threads import EngineThreads
from service.engine import Engine
from service.repository.model import Model, open_model
from service.settings import Settings
from service.telemetry.metrics.registry import Metrics


def open_one(path: Path, backend: str, rate: float) -> Model:
    return open_model(
        "measured",
        1,
        path,
        settings=Settings.model_validate(
            {"engine": {"backend": backend}, "shadow": {"rate": rate}}
        ),
        metrics=Metrics(CollectorRegistry()),
        engine_factory=partial(Engine, backend=backend),  # type: ignore[arg-type]
        threads=EngineThreads.of(cpus=1),
    )


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    small, measured, backend = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    rate = float(sys.argv[4])
    kept = [open_one(small, backend, rate)]  # code that is loaded when first used
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    kept.append(open_one(measured, backend, rate))
    sys.stdout.write(f"{status('VmHWM') - before}\n")
    sys.stdout.flush()
    os._exit(0)  # nothing is closed


if __name__ == "__main__":
    main()
