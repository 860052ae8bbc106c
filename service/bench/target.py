"""The server that is measured: where it listens, and what it says of its models and counters."""

import http.client
import ipaddress
import json
import re
import socket
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from service.errors import DSSError

ANSWER_SECONDS = 10.0
METRIC = re.compile(r'(dss_[a-z_]+)\{model="([^"]*)",version="[^"]*"\} (\S+)')


class ServerNotReachable(DSSError):
    pass


class ServerAnswersOtherwise(DSSError):
    """What answers is not a service of this project."""


class UrlWrong(DSSError):
    pass


class ModelUnknown(DSSError):
    pass


@dataclass(frozen=True)
class Server:
    host: str
    port: int
    base: str = ""  # what comes before every path
    tls: ssl.SSLContext | None = None  # the client's, if the server speaks TLS

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}{self.base}"

    @property
    def is_local(self) -> bool:
        try:
            return ipaddress.ip_address(socket.gethostbyname(self.host)).is_loopback
        except OSError:
            return False

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        connection = self._connection()
        try:
            connection.request("GET", self.base + path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerNotReachable(f"No server answers at {self.url}.") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self.tls is None:
            return http.client.HTTPConnection(self.host, self.port, timeout=ANSWER_SECONDS)
        return http.client.HTTPSConnection(
            self.host, self.port, timeout=ANSWER_SECONDS, context=self.tls
        )

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
