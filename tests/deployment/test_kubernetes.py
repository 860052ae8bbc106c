"""The Kubernetes manifests, by kustomize and by Helm: confined, and true to the service."""

import os
import re
import runpy
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml
from helpers.deployment.manifests import (
    DEPLOYMENTS,
    KUBERNETES,
    NAME,
    ROOT,
    RUNTIMES,
    Json,
    env_of,
    grace_of,
    one,
    pod_of,
    rendered,
    server_of,
    tool,
    walk,
)
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from service.batching.batcher import HEALTH_SECONDS
from service.server import supervisor
from service.settings import Settings, load
from service.telemetry.metrics.registry import Metrics

DOCKERFILE = (ROOT / "Dockerfile").read_text()
RULES = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())
# How long after a probe's verdict the last one has heard of it who sends requests here.
NEWS_SECONDS = 4.0


# --- generated -------------------------------------------------------------------------------


def test_what_is_generated_is_up_to_date() -> None:
    files = runpy.run_path(str(KUBERNETES / "generate.py"))["files"]()
    stale = [path for path, made in files.items() if path.read_text() != made]
    assert not stale, "run deploy/kubernetes/generate.py"
    assert len(files) == 3


@pytest.mark.parametrize("what", ["overlays/production", "chart, everything"])
def test_the_alerts_are_those_of_prometheus_own_file(what: str, tmp_path: Path) -> None:
    spec = one(rendered(what), "PrometheusRule")["spec"]
    assert spec == RULES
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(spec))
    command = [tool("promtool"), "check", "rules", "--lint-fatal", tmp_path / "rules.yml"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# --- confined --------------------------------------------------------------------------------


@pytest.mark.parametrize("what", DEPLOYMENTS)
def test_pods_are_as_restricted_as_kubernetes_own_profile_asks(what: str) -> None:
    pod = pod_of(what)
    uid, gid = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.M)[-1]
    assert (
        pod["securityContext"].items()
        >= {
            "runAsNonRoot": True,
            "runAsUser": int(uid),
            "runAsGroup": int(gid),
            "seccompProfile": {"type": "RuntimeDefault"},
        }.items()
    )
    assert pod["automountServiceAccountToken"] is False
    account = one(rendered(what), "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert account["metadata"]["name"] == pod["serviceAccountName"]
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        confined(container)
    allowed = {"configMap", "emptyDir", "secret"}
    assert {source for volume in pod["volumes"] for source in volume if source != "name"} <= allowed
    (tmp,) = [volume for volume in pod["volumes"] if volume["name"] == "tmp"]
    assert tmp["emptyDir"]["medium"] == "Memory"
    assert "sizeLimit" in tmp["emptyDir"]


@pytest.mark.parametrize("what", RUNTIMES)
def test_kserves_containers_are_too(what: str) -> None:
    container = server_of(what)
    confined(container)
    context = container["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] == int(re.findall(r"^USER (\d+):", DOCKERFILE, re.M)[-1])
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def confined(container: Json) -> None:
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    for amounts in container["resources"]["requests"], container["resources"]["limits"]:
        assert set(amounts) == {"cpu", "memory"}
    assert re.search(r":\d+\.\d+\.\d+$", container["image"]), "the image's version is not pinned"


@pytest.mark.parametrize("what", ["overlays/production", "chart, everything"])
def test_the_server_can_write_nothing_but_tmp(what: str) -> None:
    mounts = server_of(what)["volumeMounts"]
    assert {m["mountPath"] for m in mounts if not m.get("readOnly")} == {"/tmp"}  # noqa: S108
    assert {m["mountPath"] for m in mounts} > {"/models", "/etc/dss/keys", "/etc/dss/tls"}
    assert not any("subPath" in mount for mount in mounts), "a changed Secret would not be seen"


# --- true to the service ---------------------------------------------------------------------


def setting_names(model: type[BaseModel], prefix: str = "DSS_") -> set[str]:
    names = set()
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            names |= setting_names(inner, f"{prefix}{name.upper()}__")
        else:
            names.add(prefix + name.upper())
    return names


def settings_of(container: Json, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name in [name for name in os.environ if name.startswith("DSS_")]:
        monkeypatch.delenv(name)
    for name, value in env_of(container).items():
        monkeypatch.setenv(name, value)
    return load()


@pytest.mark.parametrize("what", [*DEPLOYMENTS, *RUNTIMES])
def test_the_environment_names_settings_and_agrees_with_ports_and_paths(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = server_of(what)
    unknown = {name for name in env_of(container) if name not in setting_names(Settings)}
    assert not unknown
    settings = settings_of(container, monkeypatch)
    assert settings.host == "0.0.0.0"  # noqa: S104
    (port,) = container["ports"]
    assert port["containerPort"] == settings.port
    assert str(settings.workers_folder) in {m["mountPath"] for m in container["volumeMounts"]}
    if what in DEPLOYMENTS:
        assert {f"DSS_MODELS={settings.models}", f"DSS_PORT={settings.port}"} <= set(
            re.findall(r"DSS_\w+=\S+", DOCKERFILE)
        )
    # Files that settings name lie in folders that are mounted.
    named = [settings.tls.cert, settings.tls.key, settings.access.keys_file]
    for file in filter(None, named):
        assert str(file.parent) in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert not {"command", "args"} & set(container), "the image's own entry point serves"


@pytest.mark.parametrize("what", [*DEPLOYMENTS, *RUNTIMES])
def test_probes_ask_what_the_service_answers(what: str, http: httpx.Client) -> None:
    container = server_of(what)
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in PROBES}
    assert paths == PROBES
    for path in paths.values():
        assert http.get(path).status_code == 200
    (port,) = container["ports"]
    speaks_tls = "DSS_TLS__CERT" in env_of(container)
    for kind in PROBES:
        asked = container[f"{kind}Probe"]["httpGet"]
        assert asked["port"] in {port["containerPort"], port.get("name")}
        assert asked.get("scheme", "HTTP") == ("HTTPS" if speaks_tls else "HTTP")


PROBES = {"startup": "/startupz", "liveness": "/livez", "readiness": "/readyz"}


@pytest.mark.parametrize("what", [*DEPLOYMENTS, *RUNTIMES])
def test_the_drain_outlasts_the_probe_and_the_grace_period_everything(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = server_of(what)
    settings = settings_of(container, monkeypatch)
    probe = container["readinessProbe"]
    assert probe["timeoutSeconds"] > HEALTH_SECONDS, "it must hear that an engine is stuck"
    noticed = probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]
    assert settings.drain_seconds >= noticed + NEWS_SECONDS
    assert "lifecycle" not in container, "the service drains itself; a preStop would only delay it"
    stopped = settings.drain_seconds + settings.stop_seconds + supervisor.LATE_SECONDS
    assert stopped < grace_of(what) <= 2 * stopped


def test_no_service_can_put_settings_into_the_environment() -> None:
    """Unless told not to, Kubernetes sets DSS_PORT=tcp://... if some Service is called dss."""
    for what in DEPLOYMENTS:
        assert pod_of(what)["enableServiceLinks"] is False
    for manifest in rendered("kserve/example"):
        assert manifest["spec"]["predictor"]["enableServiceLinks"] is False


# --- agreeing with each other ----------------------------------------------------------------


@pytest.mark.parametrize("what", DEPLOYMENTS)
def test_selectors_names_and_ports_meet(what: str) -> None:
    manifests = rendered(what)
    deployment = one(manifests, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    service = one(manifests, "Service")
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        one(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        one(manifests, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        *(
            constraint["labelSelector"]["matchLabels"]
            for constraint in pod_of(what)["topologySpreadConstraints"]
        ),
    ]
    for selector in selectors:
        assert selector
        assert selector.items() <= labels
    target = one(manifests, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    assert "replicas" not in deployment["spec"], "applying would undo the autoscaler's number"
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    (port,) = server_of(what)["ports"]
    (served,) = service["spec"]["ports"]
    assert served["targetPort"] == port["name"]
    (ingress,) = one(manifests, "NetworkPolicy")["spec"]["ingress"]
    assert [entry["port"] for entry in ingress["ports"]] == [port["name"]]
    assert ingress["from"], "an empty list would let everyone in"


@pytest.mark.parametrize("what", ["overlays/production", "chart, everything"])
def test_prometheus_finds_the_service_under_the_job_that_alerts_name(what: str) -> None:
    monitor = one(rendered(what), "ServiceMonitor")["spec"]
    service = one(rendered(what), "Service")
    labels = service["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert f'job="{labels[monitor["jobLabel"]]}"' in str(RULES)
    assert endpoint["scheme"] == "https"
    assert endpoint["authorization"]["credentials"]["name"] == f"{NAME}-keys"


@pytest.mark.parametrize("what", [*DEPLOYMENTS, *RUNTIMES])
def test_volumes_and_config_maps_that_are_used_are_there(what: str) -> None:
    manifests = rendered(what)
    made = {m["metadata"]["name"] for m in manifests if m["kind"] == "ConfigMap"}
    used = set()
    for manifest in manifests:
        for node in walk(manifest):
            if "volumes" in node and "containers" in node:
                volumes = {volume["name"] for volume in node["volumes"]}
                containers = [*node["containers"], *node.get("initContainers", [])]
                mounts = {m["name"] for c in containers for m in c["volumeMounts"]}
                assert mounts == volumes
            for key in "configMap", "configMapRef":
                if key in node:
                    used.add(node[key]["name"])
    assert used == made


@pytest.mark.parametrize("what", DEPLOYMENTS)
def test_pods_may_reach_names_and_at_most_the_storage(what: str) -> None:
    egress = one(rendered(what), "NetworkPolicy")["spec"]["egress"]
    ports = [{port["port"] for port in rule["ports"]} for rule in egress]
    copies = "initContainers" in pod_of(what)
    assert ports == ([{53}, {443}] if copies else [{53}])
    assert all(rule["to"] for rule in egress)


# --- replicas by the queue -------------------------------------------------------------------

ADAPTER = KUBERNETES / "components" / "queue-autoscaling" / "prometheus-adapter-values.yaml"


def test_the_autoscaler_asks_for_what_the_adapter_offers_and_the_service_has() -> None:
    (rule,) = yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]
    assert re.fullmatch(rule["name"]["matches"], "dss_queue_rows")
    for what in "overlays/production", "chart, everything":
        cpu, queue = one(rendered(what), "HorizontalPodAutoscaler")["spec"]["metrics"]
        assert cpu["resource"]["name"] == "cpu"
        assert queue["pods"]["metric"]["name"] == rule["name"]["as"]
    registry = CollectorRegistry()
    Metrics(registry)
    assert rule["name"]["as"] in {family.name for family in registry.collect()}
    assert rule["seriesQuery"].startswith(rule["name"]["as"] + "{")


def test_the_adapters_query_adds_up_a_pods_models_and_means_over_a_minute(tmp_path: Path) -> None:
    """As the adapter fills it in when the autoscaler asks for the pods of a namespace."""
    (rule,) = yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]
    query = rule["metricsQuery"]
    for name, value in {
        "<<.Series>>": "dss_queue_rows",
        "<<.LabelMatchers>>": 'namespace="here",pod=~"a|b"',
        "<<.GroupBy>>": "pod",
    }.items():
        query = query.replace(name, value)
    series = {
        '{namespace="here", pod="a", model="words", version="1"}': "0x9 40x4 80x20",
        '{namespace="here", pod="a", model="words", version="2"}': "5x40",
        '{namespace="here", pod="b", model="words", version="1"}': "1x40",
        '{namespace="there", pod="a", model="words", version="1"}': "900x40",
    }
    case = {
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [
                    {"series": f"dss_queue_rows{labels}", "values": values}
                    for labels, values in series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": query,
                        "eval_time": "5m",
                        "exp_samples": [
                            {"labels": '{pod="a"}', "value": 85},
                            {"labels": '{pod="b"}', "value": 1},
                        ],
                    },
                ],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(case))
    ran = subprocess.run(
        [tool("promtool"), "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
