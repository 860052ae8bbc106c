"""What the manifests and the chart come to, rendered by kustomize and Helm themselves."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.paths import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "doubly-sparse-softmax"
NAME = "doubly-sparse-softmax"
# Secrets and settings of the chart that make it what overlays/production is.
EVERYTHING = {
    "image": {"repository": "example/doubly-sparse-softmax"},
    "bundles": {
        "enabled": True,
        "source": "store:example-bucket/models",
        "names": ["demo/1"],
        "remote": {"RCLONE_CONFIG_STORE_REGION": "eu-central-1"},
        "credentialsSecret": f"{NAME}-storage",
    },
    "serviceAccount": {
        "annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::111122223333:role/example"}
    },
    "keys": {"secret": f"{NAME}-keys"},
    "tls": {"secret": f"{NAME}-tls"},
    "autoscaling": {"queueRows": 32},
    "prometheus": {"serviceMonitor": True, "rules": True},
}
RUNTIME = {"deployment": {"enabled": False}, "kserve": {"runtime": True}}

Json = dict[str, Any]


def documents(text: str) -> list[Json]:
    return [document for document in yaml.safe_load_all(text) if document is not None]


def tool(name: str) -> str:
    """A program of this environment, or else of the system."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=places)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@cache
def _kustomize_version() -> tuple[int, ...]:
    told = subprocess.run(
        [tool("kubectl"), "version", "--client", "--output", "json"], capture_output=True, text=True
    )
    version = json.loads(told.stdout).get("kustomizeVersion", "v0")
    return tuple(int(part) for part in version.removeprefix("v").split("."))


@cache
def kustomize(folder: Path) -> list[Json]:
    if _kustomize_version() < (5,):
        pytest.skip("kubectl has no kustomize 5")
    ran = subprocess.run([tool("kubectl"), "kustomize", folder], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr, ran.stderr
    return documents(ran.stdout)


def helm(*arguments: str | Path, values: Json | None = None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HELM_")}
    return subprocess.run(
        [tool("helm"), *arguments, "--values", "-"],
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
        env={**env, "KUBECONFIG": os.devnull},
    )


def chart(values: Json | None = None, folder: Path = CHART, release: str = NAME) -> list[Json]:
    ran = helm("template", release, folder, "--namespace", NAME, values=values)
    assert ran.returncode == 0, ran.stderr
    return documents(ran.stdout)


@cache
def rendered(what: str) -> list[Json]:
    match what:
        case "chart":
            return chart()
        case "chart, everything":
            return chart(EVERYTHING)
        case "chart, runtime":
            return chart(RUNTIME)
        case "kserve/example":
            files = sorted((KUBERNETES / what).glob("*.yaml"))
            return [document for file in files for document in documents(file.read_text())]
        case _:
            return kustomize(KUBERNETES / what)


RENDERED = [
    "base",
    "overlays/production",
    "kserve",
    "kserve/example",
    "chart",
    "chart, everything",
    "chart, runtime",
]
DEPLOYMENTS = ["base", "overlays/production", "chart", "chart, everything"]
RUNTIMES = ["kserve", "chart, runtime"]


def one(manifests: list[Json], kind: str) -> Json:
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def server_of(what: str) -> Json:
    """The container of the service in a Deployment or a ServingRuntime."""
    if what in RUNTIMES:
        (container,) = one(rendered(what), "ServingRuntime")["spec"]["containers"]
    else:
        (container,) = pod_of(what)["containers"]
    found: Json = container
    return found


def pod_of(what: str) -> Json:
    pod: Json = one(rendered(what), "Deployment")["spec"]["template"]["spec"]
    return pod


def grace_of(what: str) -> float:
    """How long a pod may take to end."""
    if what in RUNTIMES:  # its pods are the InferenceServices'
        examples = [manifest["spec"]["predictor"] for manifest in rendered("kserve/example")]
        return min(float(predictor["terminationGracePeriodSeconds"]) for predictor in examples)
    return float(pod_of(what)["terminationGracePeriodSeconds"])


def env_of(container: Json) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"]}


def walk(node: object) -> Iterator[Json]:
    """Every mapping of a manifest."""
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from walk(value)
    elif isinstance(node, list):
        for value in node:
            yield from walk(value)
