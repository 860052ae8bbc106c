"""The server's own promise, and what becomes of promises while traffic has drifted."""

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from helpers.fake_engine import FakeEngine
from helpers.npy_bytes import npy_bytes
from helpers.serving.promises import EASY, HARD, serving_promises
from helpers.tiny_bundle import WIDTH
from pydantic import ValidationError

from service.settings import AnswerSettings, Settings, load
from service.topk import SPARSE, Mode


def test_requests_that_name_nothing_have_the_servers_promise(tmp_path: Path) -> None:
    with serving_promises(tmp_path, recall=0.9) as made:
        found = made.answer()
        assert (found["rungs"], found["promise"]) == (["sparse", "escalated"], "kept")
        assert made.engine.modes[-1] == Mode(recall=0.9)
        response = made.http.post(
            "/topk?k=2", content=npy_bytes(np.array([EASY, HARD], np.float32)),
            headers={"content-type": "application/x-npy"},
        )  # fmt: skip
        assert response.json()["promise"] == "kept"
        tensor = {"name": "hidden", "shape": [1, 4], "datatype": "FP32", "data": EASY}
        for outputs in ([], [{"name": "rungs"}]):
            body = {"inputs": [tensor], "outputs": outputs}
            infer = made.http.post("/v2/models/tiny/infer", json=body).json()
            assert infer["parameters"] == {"promise": "kept"}
            assert infer["outputs"][-1]["data"] == [0]


@pytest.mark.parametrize(
    ("asked", "mode"),
    [
        ({"experts": 1}, SPARSE),
        ({"experts": 2}, SPARSE),
        ({"exact": False}, SPARSE),
        ({"exact": True}, Mode(exact=True)),
        ({"recall": 0.99}, Mode(recall=0.99)),
        ({"rescore": True}, Mode(rescore=True)),
    ],
)
def test_a_request_that_names_something_has_that(
    tmp_path: Path, asked: dict[str, Any], mode: Mode
) -> None:
    with serving_promises(tmp_path, recall=0.9) as made:
        made.answer(**asked)
        assert made.engine.modes[-1] == mode


@pytest.mark.parametrize("engine", [FakeEngine(WIDTH), FakeEngine(WIDTH, can_exact=True)])
def test_models_without_a_contract_promise_nothing(tmp_path: Path, engine: FakeEngine) -> None:
    with serving_promises(tmp_path, engine, recall=0.9) as made:
        assert "promise" not in made.answer()
        assert engine.modes[-1] == SPARSE


def test_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings().answers == AnswerSettings(recall=None, on_drift="report")
    monkeypatch.setenv("DSS_ANSWERS__RECALL", "0.99")
    monkeypatch.setenv("DSS_ANSWERS__ON_DRIFT", "exact")
    assert load().answers == AnswerSettings(recall=0.99, on_drift="exact")
    for wrong in ({"recall": 0}, {"recall": 1.1}, {"on_drift": "maybe"}):
        with pytest.raises(ValidationError):
            AnswerSettings.model_validate(wrong)


# --- drift -------------------------------------------------------------------------------------


def test_a_withdrawn_promise_is_reported(tmp_path: Path) -> None:
    with serving_promises(tmp_path) as made:
        assert made.answer(recall=0.9)["promise"] == "kept"
        assert made.counted("dss_contract_withdrawn_rows_total") == 0
        made.shift()
        response = made.post(recall=0.9)
        assert response.json()["promise"] == response.headers["dss-promise"] == "withdrawn"
        assert made.engine.modes[-1] == Mode(recall=0.9)
        assert made.counted("dss_contract_withdrawn_rows_total") == 2
        assert "promise" not in made.answer() and "promise" not in made.answer(exact=True)
        assert made.answer(recall=1)["promise"] == "kept", "a scan keeps any promise"
        made.shift(shifted=False)
        assert made.answer(recall=0.9)["promise"] == "kept"
        assert made.counted("dss_contract_withdrawn_rows_total") == 2


def test_or_its_rows_are_scanned(tmp_path: Path) -> None:
    with serving_promises(tmp_path, on_drift="exact") as made:
        made.shift()
        found = made.answer(recall=0.9)
        assert (found["promise"], found["rungs"]) == ("kept", ["exact", "exact"])
        assert made.counted("dss_contract_withdrawn_rows_total") == 2


@pytest.mark.parametrize("recall", [None, 0.9])
def test_or_they_are_refused(tmp_path: Path, recall: float | None) -> None:
    with serving_promises(tmp_path, on_drift="refuse", recall=recall) as made:
        made.shift()
        before = len(made.engine.calls)
        response = made.post(**({"recall": 0.9} if recall is None else {}))
        assert (response.status_code, len(made.engine.calls)) == (409, before)
        problem = response.json()
        assert problem["type"] == "urn:dss:problem:promise-withdrawn"
        assert problem["detail"].startswith("The traffic of tiny/1 has drifted")
        assert made.answer(exact=True)["rungs"] == ["exact", "exact"]
        assert made.answer(experts=1)


# --- counting, logging ----------------------------------------------------------------------


def test_rows_are_counted_by_rung(tmp_path: Path) -> None:
    with serving_promises(tmp_path) as made:
        for asked in ({}, {"recall": 0.9}, {"exact": True}, {"rescore": True}):
            made.answer(**asked)
        rows = {
            rung: made.counted("dss_answered_rows_total", rung=rung)
            for rung in ("sparse", "escalated", "exact")
        }
        assert rows == {"sparse": 5, "escalated": 1, "exact": 2}
        assert made.counted("dss_contract_rows_total") == 2
        assert made.counted("dss_rows_total") == 8


def test_a_model_without_a_head_has_sparse_rows_alone(tmp_path: Path) -> None:
    with serving_promises(tmp_path, FakeEngine(WIDTH)) as made:
        made.answer()
        text = made.http.get("/metrics").text
        assert [line for line in text.splitlines() if line.startswith("dss_answered_rows")] == [
            'dss_answered_rows_total{model="tiny",rung="sparse",version="1"} 2.0'
        ]
        assert "dss_contract_rows_total{" not in text


def test_the_access_log_has_the_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving_promises(tmp_path, access_log=1.0) as made, caplog.at_level("INFO"):
        for asked in ({"recall": 0.9}, {"exact": True}, {}):
            made.answer(**asked)
        made.answer(recall=0.9, inputs=[HARD] * 5)
    logged = [record.__dict__ for record in caplog.records if record.name == "service.access"]
    found = [(r.get("mode"), r.get("escalated")) for r in logged if r["route"] == "/topk"]
    assert found == [("recall=0.9", 1), ("exact", 0), (None, None), ("recall=0.9", 5)]


def test_openapi_describes_them(tmp_path: Path) -> None:
    with serving_promises(tmp_path) as made:
        document = orjson.loads(made.http.get("/openapi.json").content)
        schemas = document["components"]["schemas"]
        assert {"exact", "recall", "rescore"} <= schemas["TopKRequest"]["properties"].keys()
        assert {"rungs", "searched", "promise"} <= schemas["TopKAnswer"]["properties"].keys()
        topk = document["paths"]["/topk"]["post"]
        assert [p["name"] for p in topk["parameters"]] == [
            "k", "experts", "exact", "recall", "rescore"
        ]  # fmt: skip
        assert "409" in topk["responses"]
