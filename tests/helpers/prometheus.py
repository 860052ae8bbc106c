"""The committed configuration of Prometheus, for tests that run it."""

import copy
from collections.abc import Mapping
from typing import Any

from helpers.paths import ROOT
from ruamel.yaml import YAML

FILE = ROOT / "deploy" / "prometheus" / "prometheus.yml"
PACE = "200ms"

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
