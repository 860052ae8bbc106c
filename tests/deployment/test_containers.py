"""The container files: linted, agreeing with each other and with the metrics the service has.

Where Prometheus is installed it is started with the committed configuration, and every query of
the dashboard is put to it.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from helpers import prometheus as scraping
from helpers.paths import ROOT
from helpers.server import Running, free_port, running, wait_until
from helpers.tiny_bundle import N_CLASSES, SIZES, WIDTH, rows_for, write_tiny
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric
from ruamel.yaml import YAML

from deploy.grafana import dashboard
from service.bundle import flops_speedup
from service.bundle.manifest import GateFacts
from service.telemetry.metrics.registry import Metrics

PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
TOOLS = Path(sys.executable).parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()

Json = dict[str, Any]


def read_yaml(path: Path) -> Json:
    loaded: Json = YAML(typ="safe").load(path)
    return loaded


COMPOSE = read_yaml(ROOT / "docker-compose.yml")
SCRAPING = read_yaml(PROMETHEUS / "prometheus.yml")
RULES = [rule for group in read_yaml(PROMETHEUS / "rules.yml")["groups"] for rule in group["rules"]]
DATASOURCE = read_yaml(GRAFANA / "provisioning" / "datasources" / "prometheus.yml")["datasources"][
    0
]
PROVIDER = read_yaml(GRAFANA / "provisioning" / "dashboards" / "dashboards.yml")["providers"][0]
DASHBOARD_FILE = GRAFANA / "dashboards" / "doubly-sparse-softmax.json"
DASHBOARD = json.loads(DASHBOARD_FILE.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = {
    f"{panel['title']} / {target['refId']}": target["expr"]
    for panel in PANELS
    for target in panel["targets"]
}
ANNOTATIONS = {mark["name"]: mark["expr"] for mark in DASHBOARD["annotations"]["list"]}
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def mounts(service: str) -> dict[str, Path]:
    """Where a container sees which folder of the checkout; named volumes are left out."""
    volumes = [volume.split(":") for volume in COMPOSE["services"][service].get("volumes", [])]
    return {target: ROOT / source for source, target, *_ in volumes if source.startswith("./")}


# --- the image -------------------------------------------------------------------------------


def test_the_dockerfile_has_no_lint() -> None:
    run(TOOLS / "hadolint", "Dockerfile")


def test_the_last_stage_is_the_service_and_both_targets_are_unprivileged() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.M)[1:]
    by_name = {stage.split()[2]: stage for stage in stages}
    assert list(by_name)[-1] == "service"
    for target in "service", "trainer":
        assert "\nUSER 10001:10001\n" in by_name[target]
    assert "HEALTHCHECK" in by_name["service"]
    assert "trainer" not in by_name["service"], "nothing of the trainer's may reach the service"


def test_the_builder_is_sent_exactly_what_the_dockerfile_copies() -> None:
    copied = set()
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, flags=re.M):
        copied.update(line.split()[:-1])
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    assert copied == {line[1:] for line in ignore if line.startswith("!")}


# --- compose ---------------------------------------------------------------------------------


def test_the_compose_file_fits_the_compose_specification() -> None:
    tool = TOOLS / "check-jsonschema"
    run(tool, "--builtin-schema", "vendor.compose-spec", "docker-compose.yml")


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_each_container_is_confined_limited_and_restarted(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    if "build" not in service:
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), (
            "the image's version is not pinned"
        )
        assert service["healthcheck"]["test"][0] == "CMD"


def test_only_the_service_can_be_opened_to_the_network() -> None:
    ports = {name: service["ports"] for name, service in COMPOSE["services"].items()}
    assert ports.pop("service") == ["${BIND:-127.0.0.1}:${PORT:-8000}:8000"]
    for published in ports.values():
        assert all(port.startswith("127.0.0.1:") for port in published)


def test_grafana_has_no_account_and_so_no_default_password() -> None:
    environment = COMPOSE["services"]["grafana"]["environment"]
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert not any("PASSWORD" in name for name in environment)


def test_prometheus_finds_its_files_and_the_service() -> None:
    config = next(
        argument.removeprefix("--config.file=")
        for argument in COMPOSE["services"]["prometheus"]["command"]
        if argument.startswith("--config.file=")
    )
    folder, file = config.rsplit("/", 1)
    assert mounts("prometheus")[folder] / file == PROMETHEUS / "prometheus.yml"
    assert all((PROMETHEUS / name).is_file() for name in SCRAPING["rule_files"])
    (port,) = re.findall(r"DSS_PORT=(\d+)", DOCKERFILE)
    (found,) = SCRAPING["scrape_configs"][0]["dns_sd_configs"]
    assert (found["names"], found["type"], found["port"]) == (["service"], "A", int(port))
    assert "service" in COMPOSE["services"]


def test_grafana_finds_its_provisioning_its_dashboard_and_prometheus() -> None:
    mounted = mounts("grafana")
    assert mounted["/etc/grafana/provisioning"] == GRAFANA / "provisioning"
    dashboards = PROVIDER["options"]["path"]
    assert mounted[dashboards] == DASHBOARD_FILE.parent
    home = COMPOSE["services"]["grafana"]["environment"][
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"
    ]
    assert home == f"{dashboards}/{DASHBOARD_FILE.name}"
    assert DATASOURCE["url"] == "http://prometheus:9090"
    assert "prometheus" in COMPOSE["services"]
    assert DATASOURCE["jsonData"]["timeInterval"] == SCRAPING["global"]["scrape_interval"]


# --- dashboard and rules ---------------------------------------------------------------------


def test_the_committed_dashboard_is_the_one_its_code_makes() -> None:
    assert DASHBOARD_FILE.read_text() == dashboard.text(), "run make dashboard"


def test_panels_have_ids_and_titles_of_their_own_and_do_not_overlap() -> None:
    for key in "id", "title":
        values = [panel[key] for panel in DASHBOARD["panels"]]
        assert len(set(values)) == len(values)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_panels_ask_the_provisioned_data_source() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["current"]["value"] == DATASOURCE["uid"]
    for panel in PANELS:
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}


def families() -> dict[str, Metric]:
    """What the service exports, by the names that its metrics are known by."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Metrics(registry)
    return {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in registry.collect()
    }


def sample_names() -> set[str]:
    """What a scrape can show: a histogram is shown as three."""
    parts = {"histogram": ["_bucket", "_sum", "_count"]}
    return {
        name + part for name, family in families().items() for part in parts.get(family.type, [""])
    }


def metrics_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:dss_|dss:|process_)[a-z0-9_:]+", query))


def without_threshold(alert: str) -> str:
    """What an alert compares with numbers: it has a value whether the alert fires or not."""
    return re.sub(r"\s(<|>|==)\s[0-9.]+", "", ALERTS[alert]["expr"])


def test_every_metric_asked_for_is_one_the_service_or_a_rule_makes() -> None:
    known = sample_names() | {*RECORDED}
    rules = {rule.get("alert") or rule["record"]: rule["expr"] for rule in RULES}
    variables = {
        variable["name"]: variable["definition"]
        for variable in DASHBOARD["templating"]["list"]
        if variable["type"] == "query"
    }
    for name, query in {**QUERIES, **ANNOTATIONS, **rules, **variables}.items():
        assert metrics_in(query) <= known, name
    assert len(set.union(*map(metrics_in, QUERIES.values()))) > 15, "the names are not recognised"


def test_every_alert_is_seen_firing_by_its_rule_test() -> None:
    fired = {
        check["alertname"]
        for case in read_yaml(PROMETHEUS / "rules_test.yml")["tests"]
        for check in case["alert_rule_test"]
        if check["exp_alerts"]
    }
    assert fired == {*ALERTS}


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_is_wrong_what_to_do_and_where_more_is_written(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert set(alert["annotations"]) == {"summary", "action", "docs"}
    file, anchor = alert["annotations"]["docs"].split("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(), flags=re.M)
    assert anchor == name.lower()
    assert name in headings


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_compares_recorded_series_or_gauges(name: str) -> None:
    """So that a graph of what it watches can be drawn, and its distance from firing seen."""
    assert without_threshold(name) != ALERTS[name]["expr"]
    assert not re.search(r"rate\(|increase\(|_over_time\(|sum |[<>]", without_threshold(name))


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


@needs_promtool
def test_promtool_accepts_the_configuration_and_the_rules_pass_their_tests() -> None:
    run("promtool", "check", "config", "prometheus.yml", cwd=PROMETHEUS)
    run("promtool", "test", "rules", "rules_test.yml", cwd=PROMETHEUS)


# --- a real Prometheus -----------------------------------------------------------------------

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed (Debian: prometheus)"
)
VARIABLES = {"$model": "tiny", "$version": ".+", "$__rate_interval": "10s"}


class Asking:
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

    def ready(self) -> bool:
        with suppress(httpx.TransportError):
            return self._client.get("/-/ready").status_code == 200
        return False


@contextmanager
def prometheus(target_port: int, folder: Path) -> Iterator[Asking]:
    """Prometheus with the committed configuration, but for the target's address and the pace."""
    port = free_port()
    (folder / "prometheus.yml").write_text(json.dumps(scraping.of_one(target_port)))
    rules = (PROMETHEUS / "rules.yml").read_text()
    (folder / "rules.yml").write_text(re.sub(r"for: \d+m", "for: 1s", rules))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            asking = Asking(client)
            wait_until(asking.ready)
            yield asking
    finally:
        process.kill()
        process.wait()


class Watched(NamedTuple):
    service: Running
    asking: Asking
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
        prometheus(service.port, folder) as asking,
    ):
        yield Watched(service, asking, folder / "models")


GATES = GateFacts(edges=[0.5], shares=[0.5, 0.5])
# Six in ten rows to expert 0, two to each of the others; enough of them for every ratio.
SHARES = {"000": 0.6, "001": 0.2, "002": 0.2}
GOOD = {"inputs": rows_for(*[0, 0, 0, 1, 2] * 20).tolist(), "k": 2}
BAD = {"inputs": [[1.0]], "k": 2}


@needs_prometheus
def test_every_panel_every_rule_and_what_every_alert_compares_has_data(watched: Watched) -> None:
    service, asking, _ = watched
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
        if asking.values('dss_model_label_version{label="stable"} == 1'):
            watched.point("stable", 2)
        empty.difference_update([name for name in empty if asking.values(asked[name])])
        return not empty

    try:
        wait_until(all_filled)
    finally:
        assert not empty, "these stayed without data"

    def rules() -> list[Json]:
        return [rule for group in asking.get("rules")["groups"] for rule in group["rules"]]

    def states() -> dict[str, str]:
        return {rule["name"]: rule["state"] for rule in rules() if rule["type"] == "alerting"}

    assert {rule["name"] for rule in rules()} == {r.get("alert") or r["record"] for r in RULES}
    assert {rule["health"] for rule in rules()} == {"ok"}
    wait_until(lambda: states()["BundleRefused"] == "firing")  # tiny/3 is broken
    for name in "ServiceDown", "NotReady", "NoTraffic", "ErrorRatioHigh", "ExpertCollapse":
        assert states()[name] == "inactive"


@needs_prometheus
def test_the_numbers_shown_are_those_of_the_traffic(watched: Watched) -> None:
    service, asking, _ = watched
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
        seen.update({name: asking.values(QUERIES[name]) for name in expected})
        return all(seen[name] == pytest.approx(expected[name], rel=0.01) for name in expected)

    try:
        wait_until(agreed)
    finally:
        assert seen == {name: pytest.approx(value, rel=0.01) for name, value in expected.items()}
