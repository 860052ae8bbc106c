"""The chart, by Helm itself: the same as the plain manifests, and strict about its values."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.deployment.manifests import (
    CHART,
    EVERYTHING,
    NAME,
    ROOT,
    Json,
    chart,
    env_of,
    helm,
    one,
    rendered,
)

HELMS_OWN = {
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/version",
    "helm.sh/chart",
}


def plain(node: Any) -> Any:  # noqa: ANN401
    """Without what Helm or kustomize adds of its own, and lists of named things in order."""
    if isinstance(node, dict):
        left = {key: plain(value) for key, value in node.items() if key not in HELMS_OWN}
        for key in "namespace", "imagePullPolicy":
            left.pop(key, None)
        if isinstance(left.get("name"), str):  # of a ConfigMap, with a hash of its content
            left["name"] = re.sub(rf"^({NAME}-\w+)-[a-z0-9]{{10}}$", r"\1", left["name"])
        if "annotations" in left:
            left["annotations"].pop("checksum/bundles", None)
            left = {key: value for key, value in left.items() if key != "annotations" or value}
        if left.get("optional") is True:  # a Secret that the chart leaves out if it is not named
            del left["optional"]
        return left
    if isinstance(node, list):
        parts = [plain(part) for part in node]
        if all(isinstance(part, dict) and "name" in part for part in parts):
            parts.sort(key=lambda part: str(part["name"]))
        return parts
    return node


def by_kind(manifests: list[Json]) -> dict[tuple[str, str], Json]:
    made = [plain(manifest) for manifest in manifests if manifest["kind"] != "Namespace"]
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in made}


@pytest.mark.parametrize(
    "with_kustomize, with_helm",
    [
        ("base", "chart"),
        ("overlays/production", "chart, everything"),
        ("kserve", "chart, runtime"),
    ],
)
def test_the_chart_gives_what_the_plain_manifests_give(with_kustomize: str, with_helm: str) -> None:
    assert by_kind(rendered(with_helm)) == by_kind(rendered(with_kustomize))


@pytest.mark.parametrize("values", [{}, EVERYTHING, {"kserve": {"runtime": True}}])
def test_helm_finds_no_fault(values: Json) -> None:
    ran = helm("lint", "--strict", CHART, values=values)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "[WARNING]" not in ran.stdout


def test_the_chart_installs_the_version_of_this_project() -> None:
    described = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (version,) = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert described["appVersion"] == version
    for what in "base", "kserve", "chart":
        images = re.findall(rf"image: ({NAME}:\S+)", yaml.safe_dump_all(rendered(what)))
        assert images == [f"{NAME}:{version}"]


@pytest.mark.parametrize(
    "values, complaint",
    [
        ({"settings": {"drainSeconds": 6}}, "must be more than the 6 seconds"),
        ({"settings": {"drainSecond": 10}}, "drainSecond"),
        ({"settings": {"env": {"DSS_PORT": "9000"}}}, "settings.env"),
        ({"settings": {"env": {"DSS_LIMITS__MAX_ROWS": 512}}}, "DSS_LIMITS__MAX_ROWS"),
        ({"settings": {"workers": "many"}}, "workers"),
        ({"bundles": {"enabled": True}}, "source"),
        ({"bundles": {"names": ["demo"]}}, "names"),
        ({"networkPolicy": {"clients": []}}, "clients"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name is needed"),
    ],
)
def test_values_that_cannot_be_are_refused(values: Json, complaint: str) -> None:
    ran = helm("template", NAME, CHART, values=values)
    assert ran.returncode != 0
    assert complaint in ran.stderr


def test_every_value_has_a_schema_and_a_default() -> None:
    """A value that only one of the two files knows is a typing error in the other."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(schema: Json, values: Json, path: str) -> None:
        known = set(schema["properties"]) - {"global"}
        assert known == set(values), path
        for name, value in values.items():
            inner = schema["properties"][name]
            if "$ref" in inner:
                inner = schema_of(inner["$ref"])
            if isinstance(value, dict) and "properties" in inner:
                compare(inner, value, f"{path}.{name}")

    def schema_of(reference: str) -> Json:
        found: Json = schema["definitions"][reference.rsplit("/", 1)[1]]
        return found

    compare(schema, values, "values")


def test_the_grace_period_follows_the_settings() -> None:
    values = {"settings": {"drainSeconds": 60, "stopSeconds": 30.5, "workers": "auto"}}
    pod = one(chart(values), "Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 106
    (container,) = pod["containers"]
    assert env_of(container)["DSS_DRAIN_SECONDS"] == "60"
    assert env_of(container)["DSS_STOP_SECONDS"] == "30.5"
    assert env_of(container)["DSS_WORKERS"] == "auto"


def test_two_releases_do_not_share_their_pods() -> None:
    services = [one(chart(release=name), "Service") for name in ("first", "second")]
    names, selectors = zip(
        *((made["metadata"]["name"], made["spec"]["selector"]) for made in services), strict=True
    )
    assert names == (f"first-{NAME}", f"second-{NAME}")
    assert selectors[0] != selectors[1]


def test_what_pods_copy_is_copied_again_when_the_storage_changes() -> None:
    def annotations(source: str) -> Json:
        values = {"bundles": {"enabled": True, "source": source}}
        found: Json = one(chart(values), "Deployment")["spec"]["template"]["metadata"][
            "annotations"
        ]
        return found

    assert annotations("store:a/models") != annotations("store:b/models")


@pytest.mark.parametrize(
    "values, address", [({}, "http://127.0.0.1:8000"), (EVERYTHING, "https://127.0.0.1:8000")]
)
def test_the_notes_say_how_to_ask(values: Json, address: str, tmp_path: Path) -> None:
    """Helm shows notes only with a cluster, so here they are the text of a ConfigMap."""
    copy = tmp_path / NAME
    shutil.copytree(CHART, copy)
    notes = (copy / "templates" / "NOTES.txt").read_text()
    (copy / "templates" / "_notes.tpl").write_text(f'{{{{ define "notes" }}}}{notes}{{{{ end }}}}')
    (copy / "templates" / "shown.yaml").write_text(
        'kind: Notes\ntext: {{ include "notes" . | quote }}\n'
    )
    text = one(chart(values, folder=copy), "Notes")["text"]
    assert f"{address}/models" in text
    assert f"{NAME}.{NAME}.svc:8000" in text
    assert ("demo model" in text) == (not values)
    assert "\n\n\n" not in text
