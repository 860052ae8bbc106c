"""Every query of the dashboard and the rules, put to a real Prometheus that scrapes the service."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import pytest
from helpers.deployment.monitoring import (
    ALERTS,
    ANNOTATIONS,
    QUERIES,
    RECORDED,
    RULES,
    Json,
    without_threshold,
)
from helpers.deployment.prometheus import PrometheusClient, needs_prometheus, scraping
from helpers.server import Running, running, wait_until
from helpers.tiny_bundle import N_CLASSES, SIZES, WIDTH, rows_for, write_tiny

from service.bundle import flops_speedup
from service.bundle.manifest import GateFacts

GATES = GateFacts(edges=[0.5], shares=[0.5, 0.5])
# Six in ten rows to expert 0, two to each of the others; enough of them for every ratio.
SHARES = {"000": 0.6, "001": 0.2, "002": 0.2}
GOOD = {"inputs": rows_for(*[0, 0, 0, 1, 2] * 20).tolist(), "k": 2}
BAD = {"inputs": [[1.0]], "k": 2}
PROMISED = {**GOOD, "recall": 1}


class Watched(NamedTuple):
    service: Running
    prometheus: PrometheusClient
    models: Path

    def point(self, label: str, version: int) -> None:
        labels = self.models / "tiny" / "labels.json"
        written = labels.with_suffix(".new")
        written.write_text(json.dumps({label: version}))
        written.rename(labels)


@pytest.fixture(scope="module")
def watched(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A service that is scraped, with a folder of its own: tests bring and move things there."""
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copytree(models, folder / "models")
    for version in 1, 2:  # with all that live traffic can be compared with
        path = folder / "models" / "tiny" / str(version)
        shutil.rmtree(path)
        write_tiny(path, seed=version, gates=GATES, head=np.eye(N_CLASSES, WIDTH, dtype=np.float32))
    env = {"DSS_REPOSITORY__POLL_SECONDS": "0.2", "DSS_SHADOW__RATE": "1"}
    arguments = "--default-model", "tiny"
    with (
        running(folder / "models", folder / "service.log", *arguments, env=env) as service,
        scraping(service.port, folder) as prometheus,
    ):
        yield Watched(service, prometheus, folder / "models")


@needs_prometheus
def test_every_panel_every_rule_and_what_every_alert_compares_has_data(watched: Watched) -> None:
    service, prometheus, _ = watched
    asked = {
        **QUERIES,
        **ANNOTATIONS,
        **{name: name for name in RECORDED},
        **{name: without_threshold(name) for name in ALERTS},
    }
    empty = {*asked}
    watched.point("stable", 1)

    def all_filled() -> bool:
        """Traffic goes on while the panels are looked at: a rate needs counters that grow."""
        assert httpx.post(f"{service.url}/topk", json=GOOD).status_code == 200
        assert httpx.post(f"{service.url}/topk", json=BAD).status_code == 422
        assert httpx.get(f"{service.url}/readyz").status_code == 200
        if any("contract" in asked[name] for name in empty):  # few: scans lower the speedup
            assert httpx.post(f"{service.url}/topk", json=PROMISED).status_code == 200
        if prometheus.values('dss_model_label_version{label="stable"} == 1'):
            watched.point("stable", 2)
        empty.difference_update([name for name in empty if prometheus.values(asked[name])])
        return not empty

    try:
        wait_until(all_filled)
    finally:
        assert not empty, "these stayed without data"

    def rules() -> list[Json]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    def states() -> dict[str, str]:
        return {rule["name"]: rule["state"] for rule in rules() if rule["type"] == "alerting"}

    assert {rule["name"] for rule in rules()} == {r.get("alert") or r["record"] for r in RULES}
    assert {rule["health"] for rule in rules()} == {"ok"}
    wait_until(lambda: states()["BundleRefused"] == "firing")  # tiny/3 is broken
    for name in "ServiceDown", "NotReady", "NoTraffic", "ErrorRatioHigh", "ExpertCollapse":
        assert states()[name] == "inactive"


@needs_prometheus
def test_the_numbers_shown_are_those_of_the_traffic(watched: Watched) -> None:
    service, prometheus, _ = watched
    expected = {
        "Utilization, live and trained / A": SHARES,
        "Utilization, live and trained / B": {"000": 0.5, "001": 0.25, "002": 0.25},
        "Each expert / A": {f"{expert:03d}": float(size) for expert, size in enumerate(SIZES)},
        "Rows per execution and in the queue / A": {"": 100.0},
        "FLOPs speedup now / A": {"": flops_speedup(N_CLASSES, SIZES, list(SHARES.values()))},
        # exp of the entropy: 1 / (0.6^0.6 0.2^0.2 0.2^0.2)
        "Experts in use / A": {"": 0.6**-0.6 * 0.2**-0.4},
    }
    seen: dict[str, dict[str, float]] = {}

    def agreed() -> bool:
        assert httpx.post(f"{service.url}/topk", json=GOOD).status_code == 200
        seen.update({name: prometheus.values(QUERIES[name]) for name in expected})
        return all(seen[name] == pytest.approx(expected[name], rel=0.01) for name in expected)

    try:
        wait_until(agreed)
    finally:
        assert seen == {name: pytest.approx(value, rel=0.01) for name, value in expected.items()}
