"""Prometheus with the committed configuration, for tests that run it."""

import copy
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.paths import ROOT
from ruamel.yaml import YAML

from service.bench import server

FILE = ROOT / "deploy" / "prometheus" / "prometheus.yml"
PACE = "200ms"
VARIABLES = {"$model": "tiny", "$version": ".+", "$__rate_interval": "10s"}
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed (Debian: prometheus)"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="this is not root")

Json = dict[str, Any]


def committed() -> Json:
    loaded: Json = YAML(typ="safe").load(FILE)
    return loaded


def quick(config: Json) -> Json:
    """Everything that comes round does so five times a second."""
    config = copy.deepcopy(config)
    for name in "scrape_interval", "scrape_timeout", "evaluation_interval":
        assert name in config["global"]
        config["global"][name] = PACE
    return config


def at_ports(ports: Mapping[str, int]) -> Json:
    """All jobs, found by name as in Docker's network, at these ports."""
    config = quick(committed())
    for job in config["scrape_configs"]:
        (found,) = job["dns_sd_configs"]
        found["port"] = ports[found["names"][0]]
        found["refresh_interval"] = PACE
    return config


def of_one(target_port: int) -> Json:
    """The job of the service alone, with a target on this host instead of a name."""
    config = quick(committed())
    job = config["scrape_configs"][0]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{target_port}"]}]
    config["scrape_configs"] = [job]
    return config


class PrometheusClient:
    """A client of a running Prometheus."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def get(self, path: str, **parameters: str) -> Json:
        answer = self._client.get(f"/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, answer.text
        data: Json = answer.json()["data"]
        return data

    def values(self, query: str) -> dict[str, float]:
        """Series by their `expert` label (or nothing), without those that are not numbers."""
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        found = {
            series["metric"].get("expert", ""): float(series["value"][1])
            for series in self.get("query", query=query)["result"]
        }
        return {name: value for name, value in found.items() if value == value}


@contextmanager
def scraping(target_port: int, folder: Path) -> Iterator[PrometheusClient]:
    """Prometheus with the committed configuration, but for the target's address and the pace."""
    port = server.free_port()
    (folder / "prometheus.yml").write_text(json.dumps(of_one(target_port)))
    rules = (FILE.parent / "rules.yml").read_text()
    (folder / "rules.yml").write_text(re.sub(r"for: \d+m", "for: 1s", rules))
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address={server.HOST}:{port}"]
    log = folder / "log"
    with server.running(command, log, stop_signal=signal.SIGKILL) as process:
        started = server.ServerProcess(server.HOST, port, process=process, log=log)
        started.wait_for("/-/ready")
        with httpx.Client(base_url=started.url, timeout=30) as client:
            yield PrometheusClient(client)
