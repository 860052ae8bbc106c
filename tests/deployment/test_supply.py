"""What is installed and pulled: hashes, the bill of materials, and digests of images."""

import json
import re
import subprocess
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.deployment.manifests import chart
from helpers.paths import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.requirements.__main__ import FOLDER, wanted

PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)")
SBOM: dict[str, Any] = json.loads((FOLDER / "sbom.cdx.json").read_text())


def pins(text: str) -> dict[str, str]:
    found = [match.groups() for line in text.splitlines() if (match := PIN.match(line))]
    return {canonicalize_name(name): version for name, version in found}


CONSTRAINTS = pins((ROOT / "constraints.txt").read_text())
HASHED = {name: (FOLDER / name).read_text() for name in ("service.txt", "build.txt")}


def needed(requirements: list[str]) -> set[str]:
    """Everything that these need here, by what the installed packages say."""
    found: set[str] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        new = name not in found
        found.add(name)
        for asked in ["", *requirement.extras]:
            if new or asked:
                more = distribution(name).requires or []
                waiting += [(Requirement(text), asked) for text in more]
    return found


@pytest.mark.parametrize("name", HASHED)
def test_hashed_packages_are_those_of_the_constraints_and_all_that_is_needed(name: str) -> None:
    hashed = pins(HASHED[name])
    assert hashed == {package: CONSTRAINTS[package] for package in hashed}
    assert needed(wanted()[name]) <= hashed.keys(), "run make requirements"


@pytest.mark.parametrize("name", HASHED)
def test_each_package_has_the_hashes_of_its_files(name: str) -> None:
    entries = re.split(r"\n(?=[A-Za-z])", HASHED[name].partition("\n")[2])
    assert len(entries) == len(pins(HASHED[name]))
    for entry in entries:
        head, *hashes = entry.strip().split(" \\\n    ")
        assert PIN.match(head), head
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes)


def test_packages_with_code_for_machines_have_hashes_for_several_of_them() -> None:
    for name in ("numpy", "onnxruntime", "orjson", "uvloop"):
        (entry,) = re.findall(rf"^{name}==.*?(?=^\S|\Z)", HASHED["service.txt"], flags=re.M | re.S)
        assert entry.count("--hash") > 10, name


def test_the_image_and_make_install_by_hash_alone() -> None:
    dockerfile, makefile = (ROOT / "Dockerfile").read_text(), (ROOT / "Makefile").read_text()
    service = dockerfile.partition("AS service-packages")[2].partition("FROM ")[0]
    assert "--require-hashes -r service.txt" in service and "constraints" not in service
    assert "--require-hashes -r build.txt" in dockerfile
    assert "HASHES := --require-hashes" in makefile


def test_the_bill_of_materials_lists_what_is_installed_to_serve() -> None:
    assert (SBOM["bomFormat"], SBOM["metadata"]["component"]["name"]) == (
        "CycloneDX",
        "doubly-sparse-softmax",
    )
    listed = {canonicalize_name(part["name"]): part["version"] for part in SBOM["components"]}
    assert listed == pins(HASHED["service.txt"]), "run make sbom"
    for part in SBOM["components"]:
        name = canonicalize_name(part["name"])
        assert part["purl"] == f"pkg:pypi/{name}@{part['version']}"
        assert distribution(name).version == part["version"]
    graph = {one["ref"]: set(one.get("dependsOn", ())) for one in SBOM["dependencies"]}
    (direct,) = (graph[SBOM["metadata"]["component"]["bom-ref"]],)
    names = {canonicalize_name(ref.partition("==")[0]) for ref in direct}
    asked = {canonicalize_name(Requirement(text).name) for text in wanted()["service.txt"]}
    assert asked <= names


def test_the_bill_of_materials_has_nothing_of_the_machine_that_made_it() -> None:
    text = json.dumps(SBOM)
    assert "externalReferences" not in text and "file://" not in text and "/tmp" not in text  # noqa: S108


# --- digests -----------------------------------------------------------------------------------

DIGEST = "sha256:" + "ab" * 32
IMAGES = {"PYTHON", "PROMETHEUS", "GRAFANA", "HAPROXY", "RCLONE"}


def pin(folder: Path, answer: str) -> subprocess.CompletedProcess[str]:
    """The script, with a docker that answers the same for every image."""
    docker = folder / "docker"
    docker.write_text(f'#!/bin/sh\necho "$@" >>{folder}/asked\ncat >/dev/null\necho "{answer}"\n')
    docker.chmod(0o755)
    return subprocess.run(
        [ROOT / "deploy" / "image" / "pin.sh"],
        env={"DOCKER": str(docker), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_script_gives_every_image_its_digest(tmp_path: Path) -> None:
    done = pin(tmp_path, DIGEST)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert {line.partition("_IMAGE=")[0] for line in lines} == IMAGES
    assert all(re.fullmatch(rf"[A-Z]+_IMAGE=[a-z/]+@{DIGEST}", line) for line in lines)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == len(IMAGES) and all(re.search(r":[\w.-]*\d[\w.-]*$", one) for one in asked)


def test_the_script_writes_no_digest_that_is_none(tmp_path: Path) -> None:
    done = pin(tmp_path, "error: not found")
    assert done.returncode == 1
    assert "no digest of python:3.11-slim-bookworm" in done.stderr
    assert "_IMAGE=" not in done.stdout


def test_every_image_from_elsewhere_can_be_given_by_digest() -> None:
    for path in ("docker-compose.yml", "deploy/compose/replicas.yml"):
        text = (ROOT / path).read_text()
        for image in re.findall(r"^ *image: (.+)$", text, flags=re.M):
            assert image == "doubly-sparse-softmax" or re.fullmatch(
                r"\$\{[A-Z]+_IMAGE:-.+\}", image
            )
    dockerfile = (ROOT / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, flags=re.M))
    assert set(re.findall(r"^FROM (\S+)", dockerfile, flags=re.M)) - stages == {"${PYTHON_IMAGE}"}


def test_the_chart_takes_digests() -> None:
    by_digest = {"digest": DIGEST}
    values = {
        "image": by_digest,
        "bundles": {"enabled": True, "source": "s3:b", "image": by_digest},
    }
    text = yaml.safe_dump_all(chart(values))
    images = set(re.findall(r"image: (\S+)", text))
    assert {image.partition("@")[2] for image in images} == {DIGEST}
