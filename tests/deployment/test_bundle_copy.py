"""The init container's script, run with the rclone that the manifest names.

The storage is an S3 server, rclone's own (`rclone serve s3`), of files on this machine.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.deployment.manifests import KUBERNETES, env_of, pod_of, tool
from helpers.deployment.s3_server import KEYS, s3
from helpers.tiny_bundle import write_tiny

from service.cli.main import cli
from service.repository.folder import scan

SCRIPT = KUBERNETES / "components" / "bundles" / "copy-bundles.sh"
WHAT = "chart, everything"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the bucket holds: three bundles, one that is still on its way, and other things."""
    bucket = tmp_path_factory.mktemp("storage") / "bucket"
    models = bucket / "models"
    for seed, name in enumerate(["tiny/1", "tiny/2", "plain/1", "tiny/3"]):
        write_tiny(models / name, seed=seed)
    (models / "tiny" / "3" / "manifest.json").unlink()
    (models / "tiny" / "labels.json").write_text('{"stable": 1}')
    write_tiny(models / "not a model" / "1")
    write_tiny(models / "tiny" / "007")
    (models / "README").write_text("no model either")
    return bucket


@pytest.fixture(scope="module")
def storage(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, str]]:
    """The environment that the ConfigMap and the Secret give, but for the storage's address."""
    log = tmp_path_factory.mktemp("s3") / "log"
    with s3(repository.parent, log) as address:
        yield {
            **KEYS,
            "SOURCE": "store:bucket/models",
            "RCLONE_CONFIG_STORE_TYPE": "s3",
            "RCLONE_CONFIG_STORE_PROVIDER": "Rclone",
            "RCLONE_CONFIG_STORE_ENDPOINT": address,
            "RCLONE_CONFIG_STORE_ENV_AUTH": "true",
        }


def copy(storage: Mapping[str, str], target: Path, **env: str) -> subprocess.CompletedProcess[str]:
    (container,) = pod_of(WHAT)["initContainers"]
    given = {**env_of(container), **storage, "TARGET": str(target), **env}
    return subprocess.run(
        ["sh", SCRIPT],
        capture_output=True,
        text=True,
        env={"PATH": f"{Path(tool('rclone')).parent}:{os.environ['PATH']}", **given},
    )


def files(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_the_script_runs_with_the_rclone_that_the_manifest_names() -> None:
    (container,) = pod_of(WHAT)["initContainers"]
    told = subprocess.run([tool("rclone"), "version"], capture_output=True, text=True).stdout
    (version,) = re.findall(r"^rclone v(\S+)", told)
    assert container["image"].endswith(f":{version}")
    assert container["command"][1] == f"/scripts/{SCRIPT.name}"
    assert env_of(container)["TARGET"] in {
        mount["mountPath"] for mount in pod_of(WHAT)["containers"][0]["volumeMounts"]
    }


def test_whole_bundles_are_copied_and_nothing_else(
    storage: Mapping[str, str], repository: Path, tmp_path: Path
) -> None:
    ran = copy(storage, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert {name: list(found.versions) for name, found in scan(tmp_path).items()} == {
        "plain": [1],
        "tiny": [2, 1],
    }
    models = repository / "models"
    for name in "tiny/1", "tiny/2", "plain/1":
        assert files(tmp_path / name) == files(models / name)
        verified = CliRunner().invoke(cli, ["verify", str(tmp_path / name)])
        assert verified.exit_code == 0, verified.output
    assert {path.name for path in tmp_path.iterdir()} == {"tiny", "plain"}
    assert {path.name for path in (tmp_path / "tiny").iterdir()} == {"1", "2", "labels.json"}


WITNESS = """\
#!/bin/sh
"$RCLONE" "$@" || exit
(cd "$TARGET" && find . -type f | tr '\\n' ' ' && echo) >> "$SEEN"
"""


def test_the_manifest_is_last(storage: Mapping[str, str], repository: Path, tmp_path: Path) -> None:
    """After each call of rclone, the files that are there are written down."""
    target, witness, seen = (tmp_path / name for name in ("target", "bin", "seen"))
    target.mkdir()
    witness.mkdir()
    (witness / "rclone").write_text(WITNESS)
    (witness / "rclone").chmod(0o755)
    ran = copy(
        storage,
        target,
        BUNDLES="tiny/1 plain/1",
        RCLONE=tool("rclone"),
        SEEN=str(seen),
        PATH=f"{witness}:{os.environ['PATH']}",
    )
    assert ran.returncode == 0, ran.stderr
    moments = [set(line.split()) for line in seen.read_text().splitlines()]
    for name in "tiny/1", "plain/1":
        manifest = f"./{name}/manifest.json"
        rest = {f"./{name}/{file}" for file in files(repository / "models" / name)} - {manifest}
        whole = [rest <= moment for moment in moments]
        announced = [manifest in moment for moment in moments]
        assert announced[-1]
        assert whole.index(True) < announced.index(True), "it came before, or with, its files"


def test_only_the_versions_asked_for_are_copied(storage: Mapping[str, str], tmp_path: Path) -> None:
    assert copy(storage, tmp_path, BUNDLES="tiny/2").returncode == 0
    assert {name: list(found.versions) for name, found in scan(tmp_path).items()} == {"tiny": [2]}


def test_a_copy_that_was_interrupted_is_mended_and_what_does_not_belong_goes(
    storage: Mapping[str, str], repository: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "tiny" / "1"
    shutil.copytree(repository / "models" / "tiny" / "1", bundle)
    weights = bundle / "experts" / "weights.bin"
    weights.write_bytes(bytes(weights.stat().st_size))
    (bundle / "experts" / "000.onnx.1234.partial").write_bytes(b"half")
    assert copy(storage, tmp_path, BUNDLES="tiny/1").returncode == 0
    assert files(bundle) == files(repository / "models" / "tiny" / "1")


def broken(repository: Path, tmp_path: Path) -> dict[str, str]:
    """A storage of which one file cannot be read: a link to nowhere."""
    models = tmp_path / "broken"
    shutil.copytree(repository / "models" / "tiny" / "1", models / "tiny" / "1")
    weights = models / "tiny" / "1" / "experts" / "weights.bin"
    weights.unlink()
    weights.symlink_to("nowhere")
    return {
        "SOURCE": "store:/",
        "RCLONE_CONFIG_STORE_TYPE": "alias",
        "RCLONE_CONFIG_STORE_REMOTE": str(models),
        "RCLONE_COPY_LINKS": "true",
        "RCLONE_RETRIES": "1",
    }


def test_a_bundle_that_cannot_be_read_whole_has_no_manifest(
    repository: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    (target / "tiny").mkdir(parents=True)
    # Whole copies of another try do not hide it.
    shutil.copytree(repository / "models" / "tiny" / "1", target / "tiny" / "1")
    ran = copy(broken(repository, tmp_path), target)
    assert ran.returncode != 0
    assert scan(target) == {}
    assert not list(target.glob(".manifest.*"))


@pytest.mark.parametrize(
    "env, reason",
    [
        ({"SOURCE": "store:bucket/empty"}, "no bundle|not found"),
        ({"BUNDLES": "tiny/9"}, "manifest of tiny/9 cannot"),
        ({"BUNDLES": "tiny/3"}, "manifest of tiny/3 cannot"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "403|SignatureDoesNotMatch"),
        ({"SOURCE": ""}, "SOURCE"),
    ],
)
def test_failures_end_the_step_with_a_reason(
    env: dict[str, str], reason: str, storage: Mapping[str, str], tmp_path: Path
) -> None:
    ran = copy(storage, tmp_path, **{"RCLONE_RETRIES": "1", **env})
    assert ran.returncode != 0
    assert re.search(reason, ran.stderr), ran.stderr
    assert scan(tmp_path) == {}
