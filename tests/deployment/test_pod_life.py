"""Real servers in the environment of the manifests: a pod that ends, and what KServe downloads.

Nobody is here who would play the kubelet or KServe's controller, so the tests do.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from helpers.deployment.manifests import Json, env_of, grace_of, rendered, server_of
from helpers.deployment.s3_server import KEYS, s3
from helpers.server import running
from helpers.tiny_bundle import rows_for, write_tiny

BODY = {"inputs": rows_for(0, 1, 2).tolist(), "k": 2}
FASTER = 4.0  # all times of the manifest are so much shorter here


def test_whoever_stops_asking_when_the_probe_has_noticed_loses_nothing(
    models: Path, tmp_path: Path
) -> None:
    """SIGTERM, then requests on new connections until the probe has failed often enough."""
    container = server_of("chart")
    env = env_of(container)
    for name in "DSS_DRAIN_SECONDS", "DSS_STOP_SECONDS":
        env[name] = str(float(env[name]) / FASTER)
    env["DSS_WORKERS_FOLDER"] = str(tmp_path)
    env["DSS_HOST"] = "127.0.0.1"
    probe = container["readinessProbe"]
    period = probe["periodSeconds"] / FASTER
    with running(models, tmp_path / "log", "--default-model", "tiny", env=env) as server:
        server.process.send_signal(signal.SIGTERM)
        told = time.monotonic()
        failures, answers, next_look = 0, 0, told + period  # the look before was just then
        while failures < probe["failureThreshold"]:
            assert httpx.post(f"{server.url}/topk", json=BODY).status_code == 200
            answers += 1
            if time.monotonic() >= next_look:
                next_look += period
                ready = httpx.get(server.url + probe["httpGet"]["path"]).status_code == 200
                failures = 0 if ready else failures + 1
        assert httpx.post(f"{server.url}/topk", json=BODY).status_code == 200
        assert answers > failures
        assert server.process.wait(grace_of("chart") / FASTER) == 0
        assert time.monotonic() - told > float(env["DSS_DRAIN_SECONDS"])


# --- KServe ----------------------------------------------------------------------------------

KSERVE = os.environ.get("KSERVE_PYTHON")
INITIALIZER = (
    "import sys; from kserve_storage import Storage;"
    "Storage.download_files(sys.argv[1::2], sys.argv[2::2])"
)
URI = "s3://"
USUAL = "/mnt/models"  # where KServe puts a storageUri


def places(example: Json) -> list[tuple[str, str]]:
    """What an InferenceService wants downloaded, and where to."""
    predictor = example["spec"]["predictor"]
    if "storageUri" in predictor["model"]:
        return [(predictor["model"]["storageUri"], USUAL)]
    return [(place["uri"], place["mountPath"]) for place in predictor["storageUris"]]


def download(buckets: Path, uri: str, target: Path) -> None:
    """All that is below the URI, as KServe's storage initializer does it."""
    shutil.copytree(buckets / uri.removeprefix(URI), target)


def download_with_kserve(buckets: Path, uri: str, target: Path) -> None:
    if KSERVE is None:
        pytest.skip("KSERVE_PYTHON names no Python with kserve-storage (make kserve)")
    target.mkdir(parents=True)
    with s3(buckets, target.parent / "s3.log") as address:
        # The home of a user, if any, holds nothing that this may read.
        env = {**KEYS, "AWS_ENDPOINT_URL": address, "AWS_DEFAULT_REGION": "us-east-1"}
        ran = subprocess.run(
            [KSERVE, "-c", INITIALIZER, uri, target],
            capture_output=True,
            text=True,
            env={**env, "HOME": str(target), "PATH": os.environ["PATH"]},
        )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("fetch", [download, download_with_kserve])
@pytest.mark.parametrize("number", [0, 1])
def test_kserves_folder_is_served_under_the_services_name(
    number: int, fetch: Callable[[Path, str, Path], None], tmp_path: Path
) -> None:
    example = rendered("kserve/example")[number]
    name = example["metadata"]["name"]
    bucket = tmp_path / "buckets" / "example-bucket"
    write_tiny(bucket / "models" / name / "1", seed=1)
    write_tiny(bucket / "models" / name / "2", seed=2)
    for uri, place in places(example):
        fetch(tmp_path / "buckets", uri, tmp_path / place.lstrip("/"))

    env = {
        variable: value.replace("{{.Name}}", name)
        for variable, value in env_of(server_of("kserve")).items()
    }
    env |= {"DSS_HOST": "127.0.0.1", "DSS_WORKERS_FOLDER": str(tmp_path)}
    root = tmp_path / env["DSS_MODELS"].lstrip("/")
    with running(root, tmp_path / "log", env=env) as server:
        ready = httpx.get(f"{server.url}/v2/models/{name}/ready")
        assert ready.status_code == 200
        rows = rows_for(0, 1)
        hidden = {"name": "hidden", "shape": list(rows.shape), "datatype": "FP32"}
        asked = {"inputs": [{**hidden, "data": rows.tolist()}]}
        answered = httpx.post(f"{server.url}/v2/models/{name}/infer", json=asked)
        assert answered.status_code == 200
        assert answered.json()["model_version"] == "2"
