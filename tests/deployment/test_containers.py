"""The Dockerfile and the Compose file: linted, and agreeing with the files that they mount."""

import re
from pathlib import Path

import pytest
from helpers.commands import TOOLS, run
from helpers.deployment.monitoring import (
    DASHBOARD_FILE,
    DATASOURCE,
    GRAFANA,
    PROMETHEUS,
    SCRAPING,
    read_yaml,
)
from helpers.paths import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = read_yaml(ROOT / "docker-compose.yml")
PROVIDER = read_yaml(GRAFANA / "provisioning" / "dashboards" / "dashboards.yml")["providers"][0]


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
        assert re.search(r":v?\d+\.\d+\.\d+}$", service["image"]), (
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
