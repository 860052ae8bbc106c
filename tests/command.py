"""`dss` as a process of its own, which need not import torch first: it is forked by one that has.

`python -m service.cli` says the same, three seconds later.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload(
    [
        "service.cli",
        "service.engine",
        "trainer.export",
        "trainer.report",
        "trainer.tasks.synthetic",
        "trainer.tasks.tables",
        "trainer.tasks.vectors",
    ]
)


def dss(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Variables of the caller's that begin with DSS_ are not passed on; `env` is."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DSS_")}
    command = ["dss", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / "stdout", Path(folder) / "stderr"]
        process = _forking.Process(target=_run, args=(command, outputs, clean | env))
        process.start()
        process.join()
        status = process.exitcode
        assert status is not None
        process.close()
        return subprocess.CompletedProcess(command, status, *(path.read_text() for path in outputs))


def _run(command: list[str], outputs: list[Path], env: Mapping[str, str]) -> None:
    for stream, path in zip((sys.stdout, sys.stderr), outputs, strict=True):
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    from service.cli import main

    main()
