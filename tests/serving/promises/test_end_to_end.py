"""A real server, a real engine: exact answers are numpy's, promises say how they were kept."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from helpers.fidelity_layer import a_contract, all_scores, best, write_fidelity
from helpers.server import Running, running, wait_until
from helpers.tiny_bundle import N_CLASSES, WIDTH, rows_for, write_tiny
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from service import bundle
from service.cli import inspect
from service.client import Client

N, D, K = 300, 24, 8
HEAD = np.random.default_rng(3).normal(size=(N_CLASSES, WIDTH)).astype(np.float32)


class Live(NamedTuple):
    server: Running
    made: bundle.Bundle
    hidden: NDArray[np.float32]  # [B,D]
    expected: NDArray[np.int64]  # [B,N] of each row, all classes by their scores in float64

    def ask(self, model: str = "faithful", **asked: Any) -> dict[str, Any]:
        body = {"inputs": self.hidden.tolist(), **asked}
        response = httpx.post(f"{self.server.url}/models/{model}/topk", json=body, timeout=30)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def counted(self, metric: str) -> dict[str, float]:
        """The values of a counter of this model, by rung if it has any."""
        text = httpx.get(f"{self.server.url}/metrics").text
        return {
            sample.labels.get("rung", ""): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == metric and sample.labels["model"] == "faithful"
        }


@pytest.fixture(scope="module", params=["compiled", "onnx"])
def live(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("promises")
    contract = a_contract(K, ks=(1, 5))
    made = write_fidelity(
        folder / "models" / "faithful" / "1",
        n_classes=N, width=D, n_experts=K, biased=True, contract=contract,
    )  # fmt: skip
    write_tiny(folder / "models" / "learned" / "1", head=HEAD)
    hidden = np.random.default_rng(1).normal(size=(200, D)).astype(np.float32)
    assert made.rows is not None
    expected = best(all_scores(made.rows.weights, hidden, made.rows.bias), N)
    env = {"DSS_SHADOW__RATE": "1", "DSS_SHADOW__MAX_WAITING_ROWS": "10000"}
    env["DSS_ENGINE__BACKEND"] = request.param
    models = folder / "models"
    with running(models, folder / "log", "--default-model", "faithful", env=env) as server:
        yield Live(server, made, hidden, expected)


@pytest.mark.parametrize("k", [1, 5, 10, N])
def test_exact_answers_are_those_of_all_classes_in_float64(live: Live, k: int) -> None:
    found = live.ask(k=k, exact=True)
    assert found["classes"] == live.expected[:, :k].tolist()
    assert set(found["rungs"]) == {"exact"} and set(found["searched"]) == {0}
    whole = live.ask(k=k, recall=1)
    for name in ("classes", "log_probs", "rungs", "searched"):
        assert whole[name] == found[name]
    assert (whole["promise"], "promise" in found) == ("kept", False)


def test_a_promise_says_how_each_row_was_answered_and_is_counted(live: Live) -> None:
    before = live.counted("dss_answered_rows_total")
    promised = live.counted("dss_contract_rows_total")[""]
    found = live.ask(k=5, recall=0.9)
    rungs = {rung: found["rungs"].count(rung) for rung in ("sparse", "escalated", "exact")}
    assert rungs["sparse"] and rungs["escalated"] and not rungs["exact"]
    for row, rung in enumerate(found["rungs"]):
        if rung == "escalated":
            assert found["classes"][row] == live.expected[row, :5].tolist()
    assert set(found["searched"]) == {1}, "the first expert, before a row is escalated"
    after = live.counted("dss_answered_rows_total")
    assert {rung: after[rung] - before[rung] for rung in after} == rungs
    assert live.counted("dss_contract_rows_total")[""] - promised == 200


def test_more_than_was_calibrated_is_answered_exactly(live: Live) -> None:
    for asked in ({"k": 5, "recall": 0.9999}, {"k": 50, "recall": 0.5}, {"k": 5, "recall": 0.99}):
        found = live.ask(**asked)
        assert set(found["rungs"]) == {"exact"} and found["promise"] == "kept"
        assert found["classes"] == live.expected[:, : asked["k"]].tolist()  # type: ignore[misc]


def test_misses_are_found_by_the_shadow_check(live: Live) -> None:
    def counted() -> list[float]:
        names = ("checked_rows", "checked", "misses", "allowed_misses")
        return [live.counted(f"dss_contract_{name}_total")[""] for name in names]

    def is_done() -> bool:
        return counted()[0] == live.counted("dss_contract_rows_total")[""]

    wait_until(is_done)  # with the rows of other tests
    before = counted()
    found = live.ask(k=4, recall=0.5)
    misses = sum(
        len(set(expected[:4].tolist()) - {*given})
        for expected, given in zip(live.expected, found["classes"], strict=True)
    )
    assert misses > 0
    wait_until(is_done)
    rows, checked, missed, allowed = np.subtract(counted(), before).tolist()
    assert (rows, checked, missed, allowed) == (200, 800, misses, pytest.approx(400))


@pytest.mark.parametrize("binary", [False, True])
def test_tritonclient_has_the_outputs(live: Live, binary: bool) -> None:
    client = triton.InferenceServerClient(f"127.0.0.1:{live.server.port}")
    hidden = triton.InferInput("hidden", list(live.hidden.shape), "FP32")
    hidden.set_data_from_numpy(live.hidden, binary_data=binary)
    found = client.infer("faithful", [hidden], parameters={"k": 5, "recall": 0.9})
    same = live.ask(k=5, recall=0.9)
    names = ["sparse", "escalated", "exact"]
    assert [names[rung] for rung in found.as_numpy("rungs")] == same["rungs"]
    assert found.as_numpy("searched").tolist() == same["searched"]
    assert found.as_numpy("classes").tolist() == same["classes"]
    assert found.get_response()["parameters"] == {"promise": "kept"}
    client.close()


def test_the_client_has_them(live: Live) -> None:
    with Client(live.server.url) as client:
        found = client.topk(live.hidden, k=5, exact=True)
        assert found.classes.tolist() == live.expected[:, :5].tolist()
        assert set(found.rungs.tolist()) == {"exact"}  # type: ignore[union-attr]
        (version,) = client.model("faithful").versions
        assert (version.objective, version.can_exact) == ("fidelity", True)
        assert version.contract is not None and version.contract.levels == (0.5, 0.9, 0.99)


def test_what_a_model_cannot(live: Live) -> None:
    for model, asked, words in (
        ("faithful", {"rescore": True}, "rescore is for layers with learned rows"),
        ("learned", {"recall": 0.9}, "for which no recall can be promised"),
    ):
        rows = live.hidden[:1] if model == "faithful" else rows_for(0)
        body = {"inputs": rows.tolist(), **asked}
        response = httpx.post(f"{live.server.url}/models/{model}/topk", json=body)
        assert (response.status_code, words in response.json()["detail"]) == (422, True)


def test_a_learned_layer_is_rescored_or_scanned(live: Live) -> None:
    rows = rows_for(0, 1, 2)
    body = {"inputs": rows.tolist(), "k": 3}
    url = f"{live.server.url}/models/learned/topk"
    exact = httpx.post(url, json={**body, "exact": True}).json()
    assert exact["classes"] == best(all_scores(HEAD, rows), 3).tolist()
    all_experts = {"rescore": True, "experts": 3}
    assert httpx.post(url, json={**body, **all_experts}).json()["classes"] == exact["classes"]


def test_recalls_that_only_a_scan_keeps_are_visible(live: Live) -> None:
    (version,) = httpx.get(f"{live.server.url}/models/faithful").json()["versions"]
    contract = version["contract"]
    assert (contract["levels"], contract["exact_only"]) == ([0.5, 0.9, 0.99], [0.99])
    with Client(live.server.url) as client:
        known = client.model("faithful").versions[0].contract
    assert known is not None and known.exact_only == (0.99,)
    shown = inspect.table(inspect.describe(live.made))
    (line,) = [line for line in shown.splitlines() if line.startswith("contract")]
    words = "recall 0.5, 0.9 at k up to 1, 5, 0.99 exact only, calibrated on 1,000 rows"
    assert line.removeprefix("contract").strip() == words
