"""`dss` as a process of its own, which need not import torch first: it is forked by one that has.

`python -m service.cli` says the same, three seconds later.
"""

import multiprocessing
import os
import pty
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload(
    [
        "service.cli",
        "service.engine",
        "trainer.export",
        "trainer.report",
        "trainer.tasks.synthetic",
        "trainer.tasks.language_model.tables",
        "trainer.training.from_vectors",
    ]
)
COLOURS = ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS")


def dss(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Variables of the caller's that begin with DSS_ or concern colours are not passed on."""
    command = ["dss", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / "stdout", Path(folder) / "stderr"]
        process = _start(command, outputs, env)
        process.join()
        return _ended(process, command, *(path.read_text() for path in outputs))


def on_terminal(
    *arguments: object, stdout: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """The same on a terminal of 100 columns; its `stdout` is what was shown there.

    With a path, only stderr is on the terminal.
    """
    command = ["dss", *map(str, arguments)]
    ours, theirs = pty.openpty()
    terminal = Path(os.ttyname(theirs))
    known = {"TERM": "xterm-256color", "COLUMNS": "100"}
    process = _start(command, [stdout or terminal, terminal], {**known, **env})
    shown = b""
    while True:
        ready, _, _ = select.select([ours, process.sentinel], [], [])
        if ours not in ready:
            break
        shown += os.read(ours, 65536)
    process.join()
    os.close(ours)
    os.close(theirs)
    return _ended(process, command, shown.decode().replace("\r\n", "\n"), "")


def _start(command: list[str], outputs: list[Path], env: Mapping[str, str]) -> ForkServerProcess:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DSS_") and name not in COLOURS
    }
    process = _forking.Process(target=_run, args=(command, outputs, {**clean, **env}))
    process.start()
    return process


def _ended(
    process: ForkServerProcess, command: list[str], stdout: str, stderr: str
) -> subprocess.CompletedProcess[str]:
    status = process.exitcode
    assert status is not None
    process.close()
    return subprocess.CompletedProcess(command, status, stdout, stderr)


def _run(command: list[str], outputs: list[Path], env: Mapping[str, str]) -> None:
    for stream, path in zip((sys.stdout, sys.stderr), outputs, strict=True):
        with path.open("wb", buffering=0) as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    from service.cli.main import main

    main()
