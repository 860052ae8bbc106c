"""The server under load: one that runs already, or `dss serve` started for the occasion."""

import http.client
import ipaddress
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

from service.bundle.format import MANIFEST
from service.errors import DSSError
from service.repository.folder import NAME, scan

START_SECONDS = 120.0  # its loops may have to be compiled
STOP_SECONDS = 20.0
POLL_SECONDS = 0.05
ANSWER_SECONDS = 10.0
METRIC = re.compile(r'(dss_[a-z_]+)\{model="([^"]*)",version="[^"]*"\} (\S+)')


class ServerNotReachable(DSSError):
    pass


class ServerNotStarted(DSSError):
    pass


class ServerAnswersOtherwise(DSSError):
    """What answers is not a service of this project."""


class UrlWrong(DSSError):
    pass


class NothingToServe(DSSError):
    """A folder is neither a bundle nor a folder of models."""


class ModelUnknown(DSSError):
    pass


@dataclass(frozen=True)
class Server:
    host: str
    port: int
    base: str = ""  # what comes before every path

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}{self.base}"

    @property
    def is_local(self) -> bool:
        try:
            return ipaddress.ip_address(socket.gethostbyname(self.host)).is_loopback
        except OSError:
            return False

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", self.base + path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerNotReachable(f"No server answers at {self.url}.") from error
        finally:
            connection.close()

    def model(self, name: str | None) -> "Model":
        """The model of that name, or the default one."""
        status, body = self.get("/models")
        try:
            models = json.loads(body)["models"]
            if status == http.HTTPStatus.OK:
                return _find(models, name)
        except (ValueError, KeyError, TypeError) as error:
            raise ServerAnswersOtherwise(f"{self.url} does not list its models.") from error
        raise ServerAnswersOtherwise(f"{self.url}/models answers with status {status}.")

    def counters(self, model: str) -> dict[str, float]:
        """The model's own metrics by name, all versions together."""
        _, body = self.get("/metrics")
        found: dict[str, float] = {}
        for name, label, value in METRIC.findall(body.decode()):
            if label == model:
                found[name] = found.get(name, 0.0) + float(value)
        return found


@dataclass(frozen=True)
class Model:
    name: str
    version: int
    hidden_size: int

    @property
    def path(self) -> str:
        return f"/models/{self.name}/topk"


def _find(models: list[dict[str, Any]], name: str | None) -> Model:
    for model in models:
        if model["name"] == name or (name is None and model["default"]):
            if model["version"] is None:
                reason = model["refused"][0]["reason"]
                raise ModelUnknown(f"Model {model['name']!r} was refused: {reason}")
            newest = next(v for v in model["versions"] if v["version"] == model["version"])
            return Model(model["name"], model["version"], newest["hidden_size"])
    known = ", ".join(model["name"] for model in models) or "none"
    raise ModelUnknown(f"The server has no model {name!r}; it has {known}.")


def at(url: str) -> Server:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or port == 0:
        raise UrlWrong(f"{url!r} is not of the form http://host:port.")
    return Server(parts.hostname, port or 80, parts.path.rstrip("/"))


@contextmanager
def started(folder: Path, workers: int | None) -> Iterator[Server]:
    """`dss serve` on a bundle or a folder of models, on a free port; it is stopped at the end.

    DSS_* variables reach it, so that any setting can be tried.
    """
    with tempfile.TemporaryDirectory(prefix="dss-bench-") as scratch:
        models = _models_folder(folder, Path(scratch))
        server = Server("127.0.0.1", _free_port())
        command = [sys.executable, "-m", "service.cli", "serve", "--models", str(models)]
        command += ["--host", server.host, "--port", str(server.port), "--log-level", "warning"]
        command += ["--workers", str(workers)] if workers else []
        log = Path(scratch) / "log"
        with log.open("wb") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=stream)  # noqa: S603
        try:
            _wait_until_ready(server, process, log)
            yield server
        finally:
            _stop(process)


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


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    until = monotonic() + START_SECONDS
    reason = "It does not answer."
    while monotonic() < until:
        if process.poll() is not None:
            last = log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise ServerNotStarted(f"The server ended before it was ready: {last or 'no reason.'}")
        try:
            # First: if it has started and is not ready then, it is as ready as it will be.
            has_started = server.get("/startupz")[0] == http.HTTPStatus.OK
            status, body = server.get("/readyz")
            if status == http.HTTPStatus.OK:
                return
            reason = json.loads(body)["detail"]
            if has_started:
                break
        except (ServerNotReachable, ValueError, KeyError, TypeError):
            pass
        sleep(POLL_SECONDS)
    raise ServerNotStarted(f"The server does not become ready: {reason}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)  # unlike SIGTERM, without a while of draining
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
