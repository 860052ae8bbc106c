"""Starts `dss serve` or any other server, waits until it is ready, and stops it.

`dss bench` uses it, and so do the project's benchmarks and tests.
"""

import http
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from service.bench import proc_stats
from service.bench.target import Server, ServerNotReachable
from service.bundle.format import MANIFEST
from service.errors import DSSError
from service.repository.folder import NAME, scan

HOST = "127.0.0.1"
START_SECONDS = 120.0  # the engine's loops may have to be compiled
STOP_SECONDS = 20.0
POLL_SECONDS = 0.02


class ServerNotStarted(DSSError):
    pass


class NothingToServe(DSSError):
    """A folder is neither a bundle nor a folder of models."""


@dataclass(frozen=True, kw_only=True)
class ServerProcess(Server):
    process: subprocess.Popen[bytes]
    log: Path  # what it writes to stdout and stderr

    def wait_until_ready(self, seconds: float = START_SECONDS) -> None:
        self._wait(self._why_not_ready, seconds)

    def wait_for(self, path: str, status: int = 200, seconds: float = START_SECONDS) -> None:
        """Until a GET is answered with the status."""

        def why_not() -> str | None:
            found = self.get(path)[0]
            return None if found == status else f"{path} is answered with status {found}."

        self._wait(why_not, seconds)

    def _wait(self, why_not: Callable[[], str | None], seconds: float) -> None:
        until = monotonic() + seconds
        reason: str | None = "It does not answer."
        while monotonic() < until:
            if self.process.poll() is not None:
                said = last_line(self.log) or "no reason."
                raise ServerNotStarted(f"The server ended before it was ready: {said}")
            with suppress(ServerNotReachable):
                reason = why_not()
                if reason is None:
                    return
            sleep(POLL_SECONDS)
        raise ServerNotStarted(f"The server does not become ready: {reason}")

    def _why_not_ready(self) -> str | None:
        # Asked first: a server that has started and is not ready then stays so.
        has_started = self.get("/startupz")[0] == http.HTTPStatus.OK
        status, body = self.get("/readyz")
        if status == http.HTTPStatus.OK:
            return None
        try:
            reason = str(json.loads(body)["detail"])
        except (ValueError, KeyError, TypeError):
            return f"/readyz is answered with status {status}."
        if has_started:
            raise ServerNotStarted(f"The server does not become ready: {reason}")
        return reason


@contextmanager
def started(folder: Path, workers: int | None) -> Iterator[ServerProcess]:
    """`dss serve` on a bundle or a folder of models, for `dss bench`.

    DSS_* variables reach it, so that any setting can be tried.
    """
    with tempfile.TemporaryDirectory(prefix="dss-bench-") as scratch:
        models = _models_folder(folder, Path(scratch))
        arguments = ["--log-level", "warning"]
        arguments += ["--workers", str(workers)] if workers else []
        log = Path(scratch) / "log"
        # Unlike SIGTERM, SIGINT ends it without a while of draining.
        with serving(
            models, log, *arguments, inherit_settings=True, stop_signal=signal.SIGINT
        ) as server:
            yield server


@contextmanager
def serving(
    models: Path,
    log: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    inherit_settings: bool = False,
    prefix: Sequence[str] = (),
    host: str = HOST,
    port: int | None = None,
    tls: ssl.SSLContext | None = None,
    stop_signal: signal.Signals = signal.SIGTERM,
) -> Iterator[ServerProcess]:
    """`dss serve`, ready; it is stopped at the end unless it has ended by itself.

    `env` is added to this process's variables, of which DSS_* are left out unless inherited;
    `prefix` is a command that runs it, such as prlimit; `tls` is how a client reaches it.
    """
    port = port or free_port()
    command = [*prefix, sys.executable, "-m", "service.cli", "serve", "--models", str(models)]
    command += ["--host", host, "--port", str(port), *arguments]
    inherited = dict(os.environ) if inherit_settings else without_settings()
    with running(command, log, inherited | dict(env or {}), stop_signal=stop_signal) as process:
        server = ServerProcess(host, port, tls=tls, process=process, log=log)
        server.wait_until_ready()
        yield server


def without_settings() -> dict[str, str]:
    """This process's environment variables but those that set up a server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DSS_")}


@contextmanager
def running(
    command: Sequence[str | Path],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    folder: Path | None = None,
    stop_signal: signal.Signals = signal.SIGTERM,
) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a process of its own; at the end it and all that it started are gone."""
    with log.open("wb") as stream:
        process = subprocess.Popen(  # noqa: S603
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _stop(process, stop_signal)


def _stop(process: subprocess.Popen[bytes], stop_signal: signal.Signals) -> None:
    descendants = set(proc_stats.tree([process.pid]))
    process.send_signal(stop_signal)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    descendants.update(proc_stats.tree([process.pid]))
    for pid in descendants - {process.pid}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


def last_line(log: Path) -> str:
    return log.read_text(errors="replace").strip().rpartition("\n")[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _models_folder(folder: Path, scratch: Path) -> Path:
    """A single bundle is served from a folder that links to it alone."""
    if (folder / MANIFEST).is_file():
        resolved = folder.resolve()
        name = resolved.parent.name if NAME.fullmatch(resolved.parent.name) else "bundle"
        models = scratch / "models"
        (models / name).mkdir(parents=True)
        (models / name / "1").symlink_to(resolved)
        return models
    if not folder.is_dir() or not scan(folder):
        raise NothingToServe(f"{folder} is neither a bundle nor a folder of models.")
    return folder
