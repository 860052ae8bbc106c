"""Debian's HAProxy with the committed configuration, in front of servers that it finds by name, as
it does under Docker.

Replicas listen on one port of different loopback addresses. Only that port, the ports of the proxy
and the address of the name server differ from what is committed.
"""

import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from helpers.deployment.dns_server import named
from helpers.paths import ROOT
from helpers.server import Running, free_port, running, wait_until
from prometheus_client.parser import text_string_to_metric_families

from service.bench import server

CONFIG = ROOT / "deploy" / "compose" / "haproxy.cfg"
needs_haproxy = pytest.mark.skipif(
    shutil.which("haproxy") is None, reason="HAProxy is not installed (Debian: haproxy)"
)
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


@dataclass(frozen=True)
class Proxied:
    url: str
    port: int
    metrics_port: int
    log: Path

    def samples(self, name: str) -> dict[str, float]:
        """Of the backend's servers, by name."""
        answer = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics")
        return {
            sample.labels["server"]: sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
            if sample.name == name and sample.labels.get("proxy") == "replicas"
        }

    def up(self) -> int:
        """How many replicas it sends requests to."""
        answer = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics").text
        found = re.search(
            r'^haproxy_backend_active_servers\{proxy="replicas"\} (\d+)', answer, re.M
        )
        assert found, answer
        return int(found[1])


@contextmanager
def proxy(folder: Path, replicas_port: int, name_server: int, expected: int) -> Iterator[Proxied]:
    port, metrics_port = free_port(), free_port()
    config = CONFIG.read_text()
    for old, new in {
        "bind :8000": f"bind 127.0.0.1:{port}",
        "bind :8405": f"bind 127.0.0.1:{metrics_port}",
        " service:8000 ": f" service:{replicas_port} ",
        "127.0.0.11:53": f"127.0.0.1:{name_server}",
    }.items():
        assert config.count(old) == 1, old
        config = config.replace(old, new)
    (folder / "haproxy.cfg").write_text(config)
    log = folder / "proxy.log"
    proxied = Proxied(f"http://127.0.0.1:{port}", port, metrics_port, log)
    command = ["haproxy", "-db", "-f", folder / "haproxy.cfg"]
    with server.running(command, log, stop_signal=signal.SIGKILL) as process:

        def ready() -> bool:
            assert process.poll() is None, log.read_text()
            with suppress(httpx.TransportError):
                return proxied.up() == expected
            return False

        wait_until(ready)
        yield proxied


@contextmanager
def replicated(
    models: Path, folder: Path, count: int, **settings: str
) -> Iterator[tuple[Proxied, list[Running]]]:
    port, addresses = free_port(), ADDRESSES[:count]
    env = {"DSS_DEFAULT_MODEL": "tiny", **settings}
    with ExitStack() as stack, named({"service": addresses}, "127.0.0.1") as name_server:

        def start(address: str) -> Running:
            log = folder / f"{address}.log"
            return stack.enter_context(running(models, log, env=env, host=address, port=port))

        with ThreadPoolExecutor() as pool:
            replicas = list(pool.map(start, addresses))
        yield stack.enter_context(proxy(folder, port, name_server, expected=count)), replicas
