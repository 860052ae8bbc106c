"""The container files: linted, agreeing with each other and with the metrics the service has.

Where Prometheus is installed it is started with the committed configuration, and every query of
the dashboard is put to it.
"""

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import scraping
from prometheus_client import CollectorRegistry, ProcessCollector
from ruamel.yaml import YAML
from server import Running, free_port, running, wait_until
from tiny import N_CLASSES, SIZES, rows_for

from service.bundle import flops_speedup
from service.metrics import Metrics

ROOT = Path(__file__).parent.parent
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
    generated = runpy.run_path(str(GRAFANA / "dashboard.py"))["text"]()
    assert DASHBOARD_FILE.read_text() == generated, "run deploy/grafana/dashboard.py"


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


def sample_names() -> set[str]:
    """What a scrape can show: each family with the endings its type gives it."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Metrics(registry)
    endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
    return {
        family.name + ending for family in registry.collect() for ending in endings[family.type]
    }


def metrics_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:dss_|dss:|process_)[a-z0-9_:]+", query))


def test_every_metric_asked_for_is_one_the_service_or_a_rule_makes() -> None:
    known = sample_names() | {rule["record"] for rule in RULES if "record" in rule}
    rules = {rule.get("alert") or rule["record"]: rule["expr"] for rule in RULES}
    variables = {
        variable["name"]: variable["definition"]
        for variable in DASHBOARD["templating"]["list"]
        if variable["type"] == "query"
    }
    for name, query in {**QUERIES, **rules, **variables}.items():
        assert metrics_in(query) <= known, name
    assert len(set.union(*map(metrics_in, QUERIES.values()))) > 15, "the names are not recognised"


def test_every_alert_is_seen_firing_by_its_rule_test() -> None:
    fired = {
        check["alertname"]
        for case in read_yaml(PROMETHEUS / "rules_test.yml")["tests"]
        for check in case["alert_rule_test"]
        if check["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in RULES if "alert" in rule}


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
    shutil.copy(PROMETHEUS / "rules.yml", folder)
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


@pytest.fixture(scope="module")
def watched(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, Asking]]:
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        running(models, folder / "service.log", "--default-model", "tiny") as service,
        prometheus(service.port, folder) as asking,
    ):
        yield service, asking


@needs_prometheus
def test_every_panel_shows_data_and_every_rule_is_evaluated(
    watched: tuple[Running, Asking],
) -> None:
    service, asking = watched
    good = {"inputs": rows_for(0, 0, 0, 1, 2).tolist(), "k": 2}
    bad = {"inputs": [[1.0]], "k": 2}
    empty = set(QUERIES)

    def all_filled() -> bool:
        """Traffic goes on while the panels are looked at: a rate needs counters that grow."""
        assert httpx.post(f"{service.url}/topk", json=good).status_code == 200
        assert httpx.post(f"{service.url}/topk", json=bad).status_code == 422
        empty.difference_update([name for name in empty if asking.values(QUERIES[name])])
        return not empty

    try:
        wait_until(all_filled)
    finally:
        assert not empty, "these panels stayed empty"

    rules = [rule for group in asking.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {r.get("alert") or r["record"] for r in RULES}
    assert {rule["health"] for rule in rules} == {"ok"}
    states = {rule["name"]: rule["state"] for rule in rules if rule["type"] == "alerting"}
    assert states["ServiceDown"] == "inactive"
    assert states["BundleRefused"] == "pending", "tiny/3 is broken, but not yet for a minute"


@needs_prometheus
def test_the_numbers_shown_are_those_of_the_traffic(watched: tuple[Running, Asking]) -> None:
    """Five rows a request, three of them to expert 0 and one to each of the others."""
    service, asking = watched
    body = {"inputs": rows_for(0, 0, 0, 1, 2).tolist(), "k": 2}
    shares = {"000": 0.6, "001": 0.2, "002": 0.2}
    expected = {
        "Utilization, live and trained / A": shares,
        "Utilization, live and trained / B": {"000": 0.5, "001": 0.25, "002": 0.25},
        "Each expert / A": {f"{expert:03d}": float(size) for expert, size in enumerate(SIZES)},
        "Rows per execution / A": {"": 5.0},
        "FLOPs speedup now / A": {"": flops_speedup(N_CLASSES, SIZES, list(shares.values()))},
    }
    seen: dict[str, dict[str, float]] = {}

    def agreed() -> bool:
        assert httpx.post(f"{service.url}/topk", json=body).status_code == 200
        seen.update({name: asking.values(QUERIES[name]) for name in expected})
        return all(seen[name] == pytest.approx(expected[name], rel=0.01) for name in expected)

    try:
        wait_until(agreed)
    finally:
        assert seen == {name: pytest.approx(value, rel=0.01) for name, value in expected.items()}
