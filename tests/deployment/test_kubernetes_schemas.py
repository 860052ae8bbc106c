"""Every manifest fits its schema: Kubernetes' own, or of custom resources what is used here."""

import os
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helpers.deployment.manifests import (
    KUBERNETES,
    NAME,
    RENDERED,
    Json,
    documents,
    kustomize,
    one,
    rendered,
)
from jsonschema import Draft202012Validator

OLDEST, NEWEST = "1.27", kubernetes_validate.latest_version()
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())


def text(**more: Any) -> Json:
    return {"type": "string", "minLength": 1, **more}


def strict(required: str, **properties: Any) -> Json:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


def items(schema: Json) -> Json:
    return {"type": "array", "minItems": 1, "items": schema}


DURATION = text(pattern=r"^(\d+(ms|s|m|h))+$")
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
KEY = strict("name key", name=text(), key=text())
# Of custom resources, the fields that are used here; KUBERNETES_CRDS has the rest checked too.
CUSTOM = {
    "ServiceMonitor": strict(
        "selector endpoints jobLabel",
        jobLabel=text(),
        selector=strict("matchLabels", matchLabels=STRINGS),
        endpoints=items(
            strict(
                "port path interval scrapeTimeout",
                port=text(),
                path=text(pattern="^/"),
                interval=DURATION,
                scrapeTimeout=DURATION,
                scheme={"enum": ["http", "https"]},
                authorization=strict("type credentials", type=text(), credentials=KEY),
                tlsConfig=strict(
                    "serverName ca", serverName=text(), ca=strict("secret", secret=KEY)
                ),
            )
        ),
    ),
    "PrometheusRule": strict(
        "groups",
        groups=items(
            strict(
                "name rules",
                name=text(),
                interval=DURATION,
                rules=items(
                    strict(
                        "expr",
                        record=text(),
                        alert=text(),
                        expr=text(),
                        labels=STRINGS,
                        annotations=STRINGS,
                        **{"for": DURATION, "keep_firing_for": DURATION},
                    )
                ),
            )
        ),
    ),
    "ServingRuntime": strict(
        "supportedModelFormats protocolVersions containers",
        annotations=STRINGS,
        supportedModelFormats=items(
            strict(
                "name version",
                name={"const": "dss"},
                version=text(),
                autoSelect={"type": "boolean"},
                priority={"type": "integer", "minimum": 1},
            )
        ),
        protocolVersions={"const": ["v2"]},
        multiModel={"const": False},
        containers=items({"type": "object", "required": ["name", "image"]}),
        volumes=items({"type": "object", "required": ["name"]}),
    ),
    "InferenceService": strict(
        "predictor",
        predictor=strict(
            "model",
            minReplicas={"type": "integer"},
            terminationGracePeriodSeconds={"type": "integer"},
            automountServiceAccountToken={"const": False},
            enableServiceLinks={"const": False},
            model=strict(
                "modelFormat protocolVersion runtime",
                modelFormat=strict("name version", name={"const": "dss"}, version=text()),
                protocolVersion={"const": "v2"},
                runtime={"const": NAME},
                storageUri=text(pattern="^s3://"),
            ),
            storageUris=items(strict("uri mountPath", uri=text(), mountPath=text(pattern="^/"))),
        ),
    ),
}


def check(manifest: Json) -> None:
    kind = manifest["kind"]
    if kind in CUSTOM:
        Draft202012Validator(CUSTOM[kind]).validate(manifest["spec"])
    else:
        for version in OLDEST, NEWEST:
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("what", RENDERED)
def test_every_manifest_fits_its_schema(what: str) -> None:
    manifests = rendered(what)
    for manifest in manifests:
        check(manifest)
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert what == "kserve/example" or len(set(names)) == len(names)


def test_a_wrong_manifest_does_not_fit() -> None:
    """Lest the checks above accept anything."""
    deployment = yaml.safe_load(yaml.safe_dump(one(rendered("chart"), "Deployment")))
    deployment["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check(deployment)


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_component_stands_alone(component: str, tmp_path: Path) -> None:
    """Patches of what is not there, such as another component's monitor, are left out."""
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(KUBERNETES / "base", tmp_path)],
        "components": [os.path.relpath(KUBERNETES / "components" / component, tmp_path)],
        "configMapGenerator": [{"name": f"{NAME}-storage", "literals": ["SOURCE=store:models"]}],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    manifests = kustomize(tmp_path)
    for manifest in manifests:
        check(manifest)
    config_maps = [manifest for manifest in manifests if manifest["kind"] == "ConfigMap"]
    assert [m for m in manifests if m not in config_maps] != rendered("base"), "it changes nothing"


@pytest.mark.skipif(
    "KUBERNETES_CRDS" not in os.environ,
    reason="KUBERNETES_CRDS names no folder of the operators' own definitions",
)
def test_custom_resources_fit_their_operators_definitions() -> None:
    files = Path(os.environ["KUBERNETES_CRDS"]).glob("*.yaml")
    definitions = [document["spec"] for file in files for document in documents(file.read_text())]
    schemas = {
        (spec["names"]["kind"], f"{spec['group']}/{version['name']}"): Draft202012Validator(
            closed(version["schema"]["openAPIV3Schema"])
        )
        for spec in definitions
        for version in spec["versions"]
    }
    seen = set()
    for what in RENDERED:
        for manifest in rendered(what):
            if manifest["kind"] in CUSTOM:
                schema = schemas[manifest["kind"], manifest["apiVersion"]]
                schema.validate(manifest)
                assert not schema.is_valid({**manifest, "spec": {**manifest["spec"], "no": 1}})
                seen.add(manifest["kind"])
    assert seen == set(CUSTOM)


def closed(schema: Any) -> Any:  # noqa: ANN401
    """As the API server sees it: a field that is not listed is a mistake."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(part) for name, part in schema.items()}
    listed = schema.get("properties")
    opened = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(listed, dict) and schema.get("type") == "object" and not opened and listed:
        inner["additionalProperties"] = False
        if set(listed) >= {"apiVersion", "kind", "metadata", "spec"}:
            inner["properties"]["metadata"] = {"type": "object"}
    if schema.get("x-kubernetes-int-or-string"):
        inner = {"type": ["integer", "string"]}
    return inner
