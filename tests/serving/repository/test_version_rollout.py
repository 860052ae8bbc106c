"""Versions come and go, labels move and files break while a real server answers."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from helpers.altered_bundle import replace_file
from helpers.checked_traffic import traffic
from helpers.large_bundle import WIDTH, write_wide
from helpers.process_stats import descriptors, resident
from helpers.server import Running, running, wait_until
from helpers.tiny_bundle import write_tiny

from service.shared_state import worker_table

FAST = {"DSS_REPOSITORY__POLL_SECONDS": "0.1", "DSS_ACCESS__OPEN_ADMIN": "true"}
HIDDEN = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a server that tests share; each has a model of its own."""
    folder = tmp_path_factory.mktemp("versions")
    write_tiny(folder / "always" / "1")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(folder, tmp_path_factory.mktemp("log") / "log", env=FAST) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as made:
        yield made


def made(folder: Path, name: str, version: int) -> Path:
    path = folder / name / str(version)
    write_tiny(path, seed=version)
    return path


def prepared(folder: Path, version: int) -> Path:
    """A bundle that the server does not see yet."""
    return made(folder.parent / f"{folder.name}-aside", "any", version)


def serves(client: httpx.Client, name: str, version: int) -> None:
    def now() -> bool:
        answer = client.get(f"/models/{name}")
        return answer.status_code == 200 and answer.json()["version"] == version

    wait_until(now, 20)


def answers(client: httpx.Client, name: str, version: str | None = None) -> int:
    """The version that answers."""
    path = f"/models/{name}/topk" if version is None else f"/models/{name}/versions/{version}/topk"
    answer = client.post(path, json={"inputs": HIDDEN.tolist(), "k": 1})
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["version"]
    return found


def found(client: httpx.Client, name: str) -> dict[int, tuple[str, str | None]]:
    listed = client.get(f"/models/{name}").json()["found"]
    return {one["version"]: (one["state"], one["reason"]) for one in listed}


# --- coming ----------------------------------------------------------------------------------


def test_a_version_copied_slowly_is_served_when_its_manifest_comes(
    server: Running, client: httpx.Client, folder: Path
) -> None:
    first = made(folder, "slow", 1)
    serves(client, "slow", 1)
    source = prepared(folder, 2)
    destination = folder / "slow" / "2"
    with traffic(server.port, "slow", HIDDEN, {1: first, 2: source}) as flow:
        for file in sorted(source.rglob("*"), key=lambda file: file.name == "manifest.json"):
            if file.is_dir():
                continue
            assert 2 not in flow.answered
            flow.flows(20)
            target = destination / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
        flow.serves(2)
        flow.flows()
    assert "Refused slow/2" not in server.log.read_text()


def test_a_version_copied_in_the_wrong_order_is_served_once_it_is_whole(
    client: httpx.Client, folder: Path
) -> None:
    made(folder, "early", 1)
    serves(client, "early", 1)
    source, destination = prepared(folder, 3), folder / "early" / "2"
    destination.mkdir()
    shutil.copy(source / "manifest.json", destination)
    wait_until(lambda: found(client, "early").get(2, ("", ""))[0] == "refused")
    assert answers(client, "early") == 1
    shutil.copytree(source, destination, dirs_exist_ok=True)
    serves(client, "early", 2)


def test_a_bad_version_is_refused_and_the_old_one_goes_on(
    server: Running, client: httpx.Client, folder: Path
) -> None:
    first = made(folder, "bad", 1)
    serves(client, "bad", 1)
    broken = prepared(folder, 4)
    weights = broken / "experts" / "weights.bin"
    weights.write_bytes(b"\xff" + weights.read_bytes()[1:])
    with traffic(server.port, "bad", HIDDEN, {1: first}) as flow:
        broken.rename(folder / "bad" / "2")
        wait_until(lambda: found(client, "bad").get(2, ("",))[0] == "refused")
        flow.flows()
        assert flow.answered.keys() == {1}
    reason = "experts/weights.bin does not match its checksum."
    assert found(client, "bad") == {2: ("refused", reason), 1: ("loaded", None)}
    assert f"Refused bad/2: {reason}" in server.log.read_text()
    metrics = client.get("/metrics").text
    assert 'dss_refused_bundles{model="bad",version="2"} 1.0' in metrics
    assert 'dss_model_loads_total{model="bad",result="refused"} 1.0' in metrics
    refused = client.post("/v2/repository/models/bad/load")
    assert (refused.status_code, reason in refused.json()["error"]) == (400, True)


def test_numbers_that_are_of_no_use_are_refused(client: httpx.Client, folder: Path) -> None:
    made(folder, "nan", 1)
    serves(client, "nan", 1)
    bad = write_wide(folder / "nan" / "unfinished", seed=1, width=4, classes=12)
    replace_file(bad, "experts/weights.bin", np.full(4 * 12, np.nan, np.float32).tobytes())
    bad.rename(folder / "nan" / "2")
    wait_until(lambda: found(client, "nan").get(2, ("",))[0] == "refused")
    reason = "W of expert 0 holds a NaN or an infinity."
    assert found(client, "nan")[2] == ("refused", reason)
    assert answers(client, "nan") == 1


# --- labels ----------------------------------------------------------------------------------


def test_rolling_back_is_pointing_the_label_back(
    server: Running, client: httpx.Client, folder: Path
) -> None:
    bundles = {version: made(folder, "labelled", version) for version in (1, 2, 3)}
    serves(client, "labelled", 3)
    assert found(client, "labelled")[1] == ("not loaded", None)
    labels = "/models/labelled/labels"
    assert client.put(f"{labels}/stable", json={"version": 1}).status_code == 200
    assert answers(client, "labelled", "stable") == 1
    paths = ("/models/{name}/versions/stable/topk", "/v2/models/{name}/versions/stable/infer")
    with traffic(server.port, "labelled", HIDDEN, bundles, paths) as flow:
        for version in (3, 1, 2, 1):
            moved = client.put(f"{labels}/stable", json={"version": version})
            assert moved.json()["labels"] == {"stable": version}
            assert answers(client, "labelled", "stable") == version
            flow.serves(version)
    pinned = client.put(f"{labels}/default", json={"version": 2})
    assert pinned.json()["version"] == answers(client, "labelled") == 2
    assert 'dss_model_label_version{label="default",model="labelled"} 2.0' in (
        client.get("/metrics").text
    )
    # The file alone says where aliases point, also if it is written by hand.
    (folder / "labelled" / "labels.json").write_text('{"stable": 3}')
    wait_until(lambda: client.get("/models/labelled").json()["labels"] == {"stable": 3})
    assert answers(client, "labelled") == 3
    assert client.delete(f"{labels}/stable").json()["labels"] == {}


@pytest.mark.parametrize(
    ("method", "label", "body", "status", "kind"),
    [
        ("PUT", "stable", {"version": 9}, 409, "label-not-moved"),
        ("PUT", "UPPER", {"version": 1}, 409, "label-not-moved"),
        ("PUT", "stable", {"version": "1"}, 422, "invalid-field"),
        ("PUT", "stable", {"version": True}, 422, "invalid-field"),
        ("PUT", "stable", {}, 422, "invalid-field"),
        ("PUT", "stable", {"version": 1, "more": 1}, 422, "unknown-field"),
        ("PUT", "stable", [1], 422, "invalid-field"),
        ("DELETE", "stable", None, 404, "label-not-found"),
    ],
)
def test_a_wrong_change_of_a_label_is_a_problem(
    client: httpx.Client, method: str, label: str, body: object, status: int, kind: str
) -> None:
    answer = client.request(method, f"/models/always/labels/{label}", json=body)
    assert (answer.status_code, answer.json()["type"]) == (status, f"urn:dss:problem:{kind}")
    assert client.get("/models/always").json()["labels"] == {}


# --- going -----------------------------------------------------------------------------------


def test_unloading_and_loading(client: httpx.Client, folder: Path) -> None:
    made(folder, "spare", 1)
    serves(client, "spare", 1)
    assert client.post("/v2/repository/models/spare/unload").status_code == 200
    assert client.post("/models/spare/topk", json={}).status_code == 404
    made(folder, "spare", 2)
    unloaded = ("not loaded", "The model was unloaded.")
    wait_until(lambda: found(client, "spare") == {2: unloaded, 1: unloaded})
    made(folder, "later", 1)  # once this is found, the folder has been looked at once more
    serves(client, "later", 1)
    assert found(client, "spare") == {2: unloaded, 1: unloaded}
    index = client.post("/v2/repository/index", json={"ready": True}).json()
    assert "spare" not in {entry["name"] for entry in index}
    assert client.post("/v2/repository/models/spare/load").status_code == 200
    assert answers(client, "spare") == 2


@pytest.mark.parametrize("damage", ["delete", "truncate", "overwrite"])
def test_a_bundle_may_be_damaged_while_it_is_served(
    server: Running, client: httpx.Client, folder: Path, damage: str
) -> None:
    path = made(folder, damage, 1)
    serves(client, damage, 1)
    with traffic(server.port, damage, HIDDEN, {1: path}) as flow:
        if damage == "delete":
            shutil.rmtree(path.parent)
            wait_until(lambda: found(client, damage)[1] == ("loaded", "Its folder is gone."))
        else:
            for file in [file for file in path.rglob("*") if file.is_file()]:
                if damage == "truncate":
                    os.truncate(file, 0)
                else:
                    file.write_bytes(b"\x7f" * file.stat().st_size)
            wait_until(lambda: "was replaced" in str(found(client, damage)[1][1]))
        flow.flows(100)


# --- many ------------------------------------------------------------------------------------


def settled(client: httpx.Client, name: str, versions: set[int]) -> None:
    """What no longer serves has been let go: nothing is shown of it."""

    def shown() -> set[int]:
        metrics = client.get("/metrics").text.splitlines()
        prefix = f'dss_queue_rows{{model="{name}",version="'
        return {int(line.split('"')[3]) for line in metrics if line.startswith(prefix)}

    wait_until(lambda: shown() == versions, 20)


def test_swaps_under_load_fail_nothing_mix_nothing_and_keep_nothing(tmp_path: Path) -> None:
    hidden = np.random.default_rng(0).normal(size=(2, WIDTH)).astype(np.float32)
    models, aside = tmp_path / "models", tmp_path / "aside"
    first = write_wide(models / "wide" / "1", seed=1)
    with running(models, tmp_path / "log", env=FAST) as server:
        process = server.process.pid
        with (
            httpx.Client(base_url=server.url, timeout=30) as client,
            traffic(server.port, "wide", hidden, {1: first}) as flow,
        ):
            memory, open_files = [], []
            for version in range(2, 13):
                made = write_wide(aside / str(version), seed=version)
                flow.knows(version, made, hidden)
                made.rename(models / "wide" / str(version))
                flow.serves(version)
                settled(client, "wide", {version, version - 1})
                memory.append(resident(process))
                open_files.append(descriptors(process))
                if version > 3:
                    shutil.rmtree(models / "wide" / str(version - 3))
            flow.flows()
            assert flow.answered.keys() >= {1, *range(2, 13)}
    # Nine swaps of 8 MiB each would show, were they not let go.
    assert min(memory[-3:]) - min(memory[1:4]) < 12 * 2**20, memory
    assert max(open_files[-3:]) <= max(open_files[1:4]) + 1, open_files


# --- workers ---------------------------------------------------------------------------------


def copies(process: int) -> set[str]:
    """The copies of weights that a process maps."""
    maps = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {line.split()[4] for line in maps if "memfd:weights.bin" in line}


def everyone(server: Running, path: str) -> list[httpx.Response]:
    """Each new connection is another worker's."""
    body = {"inputs": HIDDEN.tolist(), "k": 1}
    return [httpx.post(server.url + path, json=body) for _ in range(4)]


def test_two_workers_follow_as_one_and_share_one_copy(tmp_path: Path) -> None:
    models = tmp_path / "models"
    bundles = {1: made(models, "tiny", 1)}
    env = {**FAST, "DSS_WORKERS_FOLDER": str(tmp_path)}
    with (
        running(models, tmp_path / "log", "--workers", "2", env=env) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        (shared,) = tmp_path.glob("dss-*")

        def workers() -> list[int]:
            return list(worker_table.read(shared).workers.values())

        def all_map(number: int) -> bool:
            first, second = map(copies, workers())
            return first == second and len(first) == number

        assert all_map(1)
        with traffic(server.port, "tiny", HIDDEN, bundles) as flow:
            for version in (2, 3):
                path = prepared(models, version)
                flow.knows(version, path, HIDDEN)
                path.rename(models / "tiny" / str(version))
                assert client.post("/v2/repository/models/tiny/load").status_code == 200
                for answer in everyone(server, "/models/tiny/topk"):
                    assert answer.json()["version"] == version
            wait_until(lambda: all_map(2))
            for version in (1, 3):
                moved = client.put("/models/tiny/labels/stable", json={"version": version})
                assert moved.status_code == 200
                for answer in everyone(server, "/models/tiny/versions/stable/topk"):
                    assert answer.json()["version"] == version
            flow.flows()
        killed = workers()[0]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: len(workers()) == 2 and killed not in workers() and all_map(2))
        with httpx.Client(base_url=server.url, timeout=60) as again:
            assert again.post("/v2/repository/models/tiny/unload").status_code == 200
        assert {one.status_code for one in everyone(server, "/models/tiny/topk")} == {404}
        wait_until(lambda: all_map(0))
