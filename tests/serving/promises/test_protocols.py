"""Exact answers and promised recall through every protocol and form of body."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tritonclient.http as triton
from helpers.fake_engine import FakeEngine
from helpers.npy_bytes import npy_bytes
from helpers.serving.promises import EASY, HARD, Served, serving_promises
from helpers.tiny_bundle import WIDTH

from service.settings import Limits
from service.topk import SPARSE, Mode

ROWS = np.array([EASY, HARD], np.float32)

# What is asked, the mode in which the engine is called, the rungs, the experts searched, a promise.
MODES = [
    ({"exact": True}, Mode(exact=True), ["exact", "exact"], [0, 0], None),
    ({"recall": 0.95}, Mode(recall=0.99), ["sparse", "escalated"], [1, 1], "kept"),
    ({"recall": 0.5}, Mode(recall=0.9), ["sparse", "escalated"], [1, 1], "kept"),
    ({"recall": 0.999}, Mode(recall=1.0), ["exact", "exact"], [0, 0], "kept"),
    ({"recall": 1}, Mode(recall=1.0), ["exact", "exact"], [0, 0], "kept"),
    ({"rescore": True}, Mode(rescore=True), ["sparse", "sparse"], [1, 1], None),
    ({"rescore": True, "experts": 3}, Mode(rescore=True), ["sparse", "sparse"], [3, 3], None),
    ({"exact": True, "experts": 1}, Mode(exact=True), ["exact", "exact"], [0, 0], None),
]
PLAIN: list[dict[str, Any]] = [
    {},
    {"experts": 2},
    {"exact": False},
    {"exact": False, "rescore": False},
]
each_mode = pytest.mark.parametrize(("asked", "mode", "rungs", "searched", "promise"), MODES)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_promises(tmp_path_factory.mktemp("models")) as made:
        yield made


def query_of(fields: dict[str, Any]) -> str:
    return "&".join(f"{name}={orjson.dumps(value).decode()}" for name, value in fields.items())


@each_mode
def test_json(
    served: Served, asked: dict[str, Any], mode: Mode, rungs: list[str], searched: list[int],
    promise: str | None,
) -> None:  # fmt: skip
    for _ in range(3):  # the second time on, its head is known
        response = served.post(**asked)
        found = response.json()
        assert served.engine.modes[-1] == mode
        assert (found["rungs"], found["searched"]) == (rungs, searched)
        assert found.get("promise") == promise == response.headers.get("dss-promise")
        assert found["classes"] == [[1, 2], [2, 3]]


@pytest.mark.parametrize("asked", PLAIN)
def test_a_plain_answer_says_nothing_of_them(served: Served, asked: dict[str, Any]) -> None:
    response = served.post(**asked)
    assert served.engine.modes[-1] == SPARSE
    assert list(response.json()) == ["model", "version", "classes", "log_probs", "experts", "gates"]
    assert "dss-promise" not in response.headers
    records = served.http.post(
        f"/topk?{query_of(asked)}", content=npy_bytes(ROWS),
        headers={"content-type": "application/x-npy", "accept": "application/x-npy"},
    )  # fmt: skip
    names = np.load(io.BytesIO(records.content)).dtype.names
    assert names == ("classes", "log_probs", "experts", "gates")
    infer = served.http.post("/v2/models/tiny/infer", json=infer_body(asked)).json()
    assert [output["name"] for output in infer["outputs"]] == list(names)
    assert "parameters" not in infer


@each_mode
@pytest.mark.parametrize("rows", [2, 1])
def test_npy(
    served: Served, asked: dict[str, Any], mode: Mode, rungs: list[str], searched: list[int],
    promise: str | None, rows: int,
) -> None:  # fmt: skip
    response = served.http.post(
        f"/topk?k=2&{query_of(asked)}", content=npy_bytes(ROWS[:rows]),
        headers={"content-type": "application/x-npy", "accept": "application/x-npy"},
    )  # fmt: skip
    found = np.load(io.BytesIO(response.content))
    assert served.engine.modes[-1] == mode
    assert found["rungs"].tolist() == rungs[:rows]
    assert found["searched"].tolist() == searched[:rows]
    assert found["classes"].tolist() == [[1, 2], [2, 3]][:rows]
    assert response.headers.get("dss-promise") == promise


def infer_body(parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    tensor = {"name": "hidden", "shape": [2, WIDTH], "datatype": "FP32", "data": ROWS.tolist()}
    return {"inputs": [tensor], "parameters": {"k": 2, **parameters}, **more}


@each_mode
@pytest.mark.parametrize("binary", [False, True])
def test_v2(
    served: Served, asked: dict[str, Any], mode: Mode, rungs: list[str], searched: list[int],
    promise: str | None, binary: bool,
) -> None:  # fmt: skip
    client = triton.InferenceServerClient(str(served.http.base_url).removeprefix("http://"))
    hidden = triton.InferInput("hidden", [2, WIDTH], "FP32")
    hidden.set_data_from_numpy(ROWS, binary_data=binary)
    names = ["rungs", "searched", "classes"]
    wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in names]
    for outputs in (None, wanted):
        found = client.infer("tiny", [hidden], outputs=outputs, parameters={"k": 2, **asked})
        assert served.engine.modes[-1] == mode
        assert found.as_numpy("rungs").dtype == np.uint8
        numbers = [["sparse", "escalated", "exact"].index(rung) for rung in rungs]
        assert found.as_numpy("rungs").tolist() == numbers
        assert found.as_numpy("searched").tolist() == searched
        assert found.as_numpy("classes").tolist() == [[1, 2], [2, 3]]
        assert found.get_response().get("parameters", {}).get("promise") == promise
    client.close()


@pytest.mark.parametrize("media_type", ["application/json", "application/x-npy"])
def test_large_bodies_and_answers(served: Served, media_type: str) -> None:
    rows = np.tile(ROWS, (1500, 1))
    is_json = media_type == "application/json"
    body = orjson.dumps({"inputs": rows.tolist(), "k": 20, "recall": 0.95})
    response = served.http.post(
        "/topk" if is_json else "/topk?k=20&recall=0.95",
        content=body if is_json else npy_bytes(rows),
        headers={"content-type": media_type, "accept": media_type},
    )
    assert response.status_code == 200, response.text
    assert response.headers["dss-promise"] == "kept"
    if is_json:
        found = response.json()
        assert found["rungs"] == ["sparse", "escalated"] * 1500
        assert found["searched"] == [1, 1] * 1500
    else:
        records = np.load(io.BytesIO(response.content))
        assert records["rungs"].tolist() == ["sparse", "escalated"] * 1500
    infer = infer_body({"recall": 0.95, "k": 20})
    infer["inputs"][0] |= {"shape": list(rows.shape), "data": rows.ravel().tolist()}
    outputs = served.http.post("/v2/models/tiny/infer", json=infer).json()["outputs"]
    assert outputs[-1] == {
        "name": "rungs", "datatype": "UINT8", "shape": [3000], "data": [0, 1] * 1500
    }  # fmt: skip


# --- what is wrong -----------------------------------------------------------------------------

# Fields of a body or parameters, the problem, and a part of its sentence.
WRONG = [
    ({"recall": 0}, "recall-out-of-range", "recall is 0; a share above 0 and up to 1 is expected."),
    ({"recall": -0.5}, "recall-out-of-range", "recall is -0.5;"),
    ({"recall": 1.2}, "recall-out-of-range", "recall is 1.2;"),
    ({"recall": 2**62}, "recall-out-of-range", "recall is 4.61169e+18;"),
    ({"recall": "0.9"}, "invalid-field", "'recall' must be a number"),
    ({"recall": True}, "invalid-field", "'recall' must be a number"),
    ({"recall": None}, "invalid-field", "'recall' must be a number"),
    ({"recall": [0.9]}, "invalid-field", "'recall' must be a number"),
    ({"exact": 1}, "invalid-field", "'exact' must be true or false"),
    ({"exact": "yes"}, "invalid-field", "'exact' must be true or false"),
    ({"rescore": None}, "invalid-field", "'rescore' must be true or false"),
    ({"exact": True, "recall": 0.9}, "modes-conflict", "Only one of 'exact', 'recall'"),
    ({"exact": True, "rescore": True}, "modes-conflict", "Only one of 'exact', 'recall'"),
    ({"recall": 1, "rescore": True}, "modes-conflict", "Only one of 'exact', 'recall'"),
    ({"exact": True, "experts": 2}, "modes-conflict", "'experts' goes with neither"),
    ({"recall": 0.9, "experts": 4}, "modes-conflict", "'experts' goes with neither"),
]
each_wrong = pytest.mark.parametrize(("asked", "slug", "words"), WRONG)


@each_wrong
def test_wrong_fields_are_refused_before_the_engine_is_asked(
    served: Served, asked: dict[str, Any], slug: str, words: str
) -> None:
    before = len(served.engine.calls)
    response = served.post(**asked)
    problem = response.json()
    assert (response.status_code, problem["type"]) == (422, f"urn:dss:problem:{slug}")
    assert words in problem["detail"] and problem["detail"].count(". ") == 0
    infer = served.http.post("/v2/models/tiny/infer", json=infer_body(asked))
    assert (infer.status_code, words in infer.json()["error"]) == (422, True)
    response = served.http.post(
        f"/topk?{query_of(asked)}", content=npy_bytes(ROWS),
        headers={"content-type": "application/x-npy"},
    )  # fmt: skip
    assert response.status_code == 422
    assert len(served.engine.calls) == before


@pytest.mark.parametrize("text", ["", "nan", "inf", "0x1", "1_0", " 0.9", "0.9x", "9" * 5000, "+1"])
def test_a_recall_in_a_query_string_must_be_a_number(served: Served, text: str) -> None:
    before = len(served.engine.calls)
    headers = {"content-type": "application/x-npy"}
    response = served.http.post(
        "/topk", params={"recall": text}, content=npy_bytes(ROWS), headers=headers
    )
    assert (response.status_code, response.json()["detail"]) == (422, "'recall' must be a number.")
    assert len(served.engine.calls) == before


def test_a_large_body_with_a_wrong_field_is_refused_before_its_rows_are_read(
    served: Served,
) -> None:
    rows = np.tile(ROWS, (4000, 1))  # more than may be asked
    body = orjson.dumps({"inputs": rows.tolist(), "recall": 2})
    headers = {"content-type": "application/json"}
    response = served.http.post("/topk", content=body, headers=headers)
    assert response.json()["type"] == "urn:dss:problem:recall-out-of-range"


@pytest.mark.parametrize(
    ("engine", "asked", "slug"),
    [
        (FakeEngine(WIDTH), {"exact": True}, "no-head"),
        (FakeEngine(WIDTH), {"recall": 0.9}, "no-head"),
        (FakeEngine(WIDTH), {"rescore": True}, "no-head"),
        (FakeEngine(WIDTH, can_exact=True), {"recall": 0.9}, "no-contract"),
    ],
)
def test_what_a_model_cannot_is_refused(
    tmp_path: Path, engine: FakeEngine, asked: dict[str, Any], slug: str
) -> None:
    with serving_promises(tmp_path, engine) as made:
        before = len(engine.calls)
        response = made.post(**asked)
        assert (response.status_code, response.json()["type"]) == (422, f"urn:dss:problem:{slug}")
        infer = made.http.post("/v2/models/tiny/infer", json=infer_body(asked))
        assert (infer.status_code, infer.json()["error"]) == (422, response.json()["detail"])
        assert len(engine.calls) == before


@pytest.mark.parametrize("asked", [{"exact": True}, {"recall": 0.9}])
def test_a_scan_counts_in_the_scores_of_a_request(tmp_path: Path, asked: dict[str, Any]) -> None:
    """The fake engine scores 1 for a plain row, and 101 for one that may be scanned."""
    with serving_promises(tmp_path, limits=Limits(max_scores=201)) as made:
        before = len(made.engine.calls)
        response = made.post(**asked)
        assert (response.status_code, len(made.engine.calls)) == (413, before)
        assert "2 rows for which all classes may be scanned" in response.json()["detail"]
        assert made.post().status_code == 200
        assert made.post(inputs=[HARD], **asked).status_code == 200


def test_outputs_of_a_mode_are_refused_by_name_without_one(served: Served) -> None:
    before = len(served.engine.calls)
    body = infer_body({}, outputs=[{"name": "rungs"}])
    response = served.http.post("/v2/models/tiny/infer", json=body)
    assert response.status_code == 422
    assert response.json()["error"].startswith("The output 'rungs' is there only if 'exact'")
    assert len(served.engine.calls) == before


# --- what is said of a model -----------------------------------------------------------------


def test_a_model_says_what_it_can(served: Served, tmp_path: Path) -> None:
    (version,) = served.http.get("/models/tiny").json()["versions"]
    assert (version["objective"], version["can_exact"]) == ("accuracy", True)
    assert version["contract"] == {
        "rows": 1000, "levels": [0.9, 0.99], "ks": [10], "exact_only": []
    }  # fmt: skip
    config = served.http.get("/v2/models/tiny/config").json()["parameters"]
    assert config["can_exact"] == {"string_value": "true"}
    assert config["recall_levels"] == {"string_value": "0.9,0.99"}
    assert config["rungs"] == {"string_value": "sparse,escalated,exact"}
    with serving_promises(tmp_path, FakeEngine(WIDTH)) as made:
        (version,) = made.http.get("/models/tiny").json()["versions"]
        assert (version["can_exact"], version["contract"]) == (False, None)
        config = made.http.get("/v2/models/tiny/config").json()["parameters"]
        assert config["recall_levels"] == {"string_value": ""}
