"""The Open Inference Protocol by hand; test_tritonclient.py and test_kserve.py ask by clients."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from helpers.server import running, wait_until
from helpers.tiny_bundle import N_CLASSES, WIDTH, rows_for
from numpy.typing import NDArray

from service import bundle
from service.engine import Engine

ROWS = rows_for(0, 1, 2)
INFER = "/v2/models/tiny/infer"
LENGTH = "inference-header-content-length"
OUTPUTS = {"classes": np.int64, "log_probs": np.float32, "experts": np.int64, "gates": np.float32}


@pytest.fixture(scope="module")
def engine(models: Path) -> Engine:
    return Engine(bundle.read(models / "tiny" / "2"))


def request(rows: NDArray[np.floating[Any]] = ROWS, **more: object) -> dict[str, Any]:
    tensor = {
        "name": "hidden",
        "shape": list(rows.shape),
        "datatype": f"FP{8 * rows.itemsize}",
        "data": rows.ravel().tolist(),
    }
    return {"inputs": [tensor], **more}


def binary_request(
    rows: NDArray[np.floating[Any]] = ROWS, padding: int = 0, **more: object
) -> tuple[bytes, dict[str, str]]:
    document = request(rows, **more)
    tensor = document["inputs"][0]
    del tensor["data"]
    tensor["parameters"] = {"binary_data_size": rows.nbytes}
    head = orjson.dumps(document) + b" " * padding
    return head + rows.tobytes(), {LENGTH: str(len(head))}


def tensors(response: httpx.Response) -> dict[str, NDArray[Any]]:
    """The outputs, wherever they are."""
    assert response.status_code == 200, response.text
    length = int(response.headers.get(LENGTH, len(response.content)))
    document, rest = orjson.loads(response.content[:length]), response.content[length:]
    found = {}
    for output in document["outputs"]:
        dtype = {"INT64": np.int64, "FP32": np.float32}[output["datatype"]]
        if "data" in output:
            values = np.array(output["data"], dtype)
        else:
            size = output["parameters"]["binary_data_size"]
            values, rest = np.frombuffer(rest[:size], dtype), rest[size:]
        found[output["name"]] = values.reshape(output["shape"])
    assert rest == b""
    return found


def assert_answers(found: dict[str, NDArray[Any]], engine: Engine, k: int, experts: int) -> None:
    expected = engine.topk(ROWS, k, experts)
    for name, dtype in OUTPUTS.items():
        assert found[name].dtype == dtype
        np.testing.assert_allclose(found[name], getattr(expected, name), rtol=1e-5)
    np.testing.assert_array_equal(found["classes"], expected.classes)


def test_json_in_and_out(http: httpx.Client, engine: Engine) -> None:
    response = http.post(INFER, json=request(id="a request", parameters={"k": 4, "experts": 2}))
    assert response.headers["content-type"] == "application/json"
    document = response.json()
    assert (document["model_name"], document["model_version"]) == ("tiny", "2")
    assert document["id"] == "a request"
    assert_answers(tensors(response), engine, 4, 2)


def test_rows_may_be_nested(http: httpx.Client, engine: Engine) -> None:
    document = request(parameters={"k": 4})
    document["inputs"][0]["data"] = ROWS.tolist()
    assert_answers(tensors(http.post(INFER, json=document)), engine, 4, 1)


@pytest.mark.parametrize("padding", range(4))
def test_binary_in_and_out_wherever_the_tensor_lies(
    http: httpx.Client, engine: Engine, padding: int
) -> None:
    parameters = {"k": 4, "binary_data_output": True}
    content, headers = binary_request(padding=padding, parameters=parameters)
    for _ in range(2):  # and when its head is known
        response = http.post(INFER, content=content, headers=headers)
        assert response.headers["content-type"] == "application/octet-stream"
        assert_answers(tensors(response), engine, 4, 1)


def test_each_output_is_sent_as_it_was_asked_for(http: httpx.Client) -> None:
    outputs = [
        {"name": "gates", "parameters": {"binary_data": False}},
        {"name": "classes", "parameters": {"binary_data": True}},
    ]
    content, headers = binary_request(outputs=outputs, parameters={"k": 1})
    response = http.post(INFER, content=content, headers=headers)
    assert list(tensors(response)) == ["gates", "classes"]
    length = int(response.headers[LENGTH])
    assert len(response.content) - length == len(ROWS) * 8


def test_k_is_ten_and_the_version_the_newest_unless_said(http: httpx.Client) -> None:
    response = http.post(INFER, json=request())
    assert tensors(response)["classes"].shape == (3, 10)
    response = http.post("/v2/models/tiny/versions/1/infer", json=request())
    assert response.json()["model_version"] == "1"


def changed(**fields: object) -> dict[str, Any]:
    """A request whose tensor differs."""
    document = request()
    document["inputs"][0] |= fields
    return document


def asked_for(parameters: object) -> dict[str, Any]:
    return request(outputs=[{"name": "classes", "parameters": parameters}])


BAD: dict[str, tuple[int, object]] = {
    "not json": (400, b"{"),
    "a list": (422, []),
    "no inputs": (422, {}),
    "two inputs": (422, {"inputs": [{}, {}]}),
    "another input": (422, changed(name="other")),
    "another type": (422, changed(datatype="BF16")),
    "a type that is none": (422, changed(datatype=[])),
    "FP16 as JSON": (422, changed(datatype="FP16")),
    "FP64 too large": (422, changed(datatype="FP64", data=[1e39] * 12)),
    "shared memory": (400, changed(parameters={"shared_memory_region": "r"})),
    "output in shared memory": (400, asked_for({"shared_memory_region": "r"})),
    "classification": (400, asked_for({"classification": 3})),
    "output's parameters": (422, asked_for(3)),
    "timeout": (422, request(parameters={"timeout": 1.5})),
    "negative timeout": (422, request(parameters={"timeout": -1})),
    "no shape": (422, changed(shape=None)),
    "one dimension": (422, changed(shape=[12])),
    "a boolean size": (422, changed(shape=[True, 12])),
    "no row": (422, changed(shape=[0, WIDTH], data=[])),
    "no width": (422, changed(shape=[3, 0], data=[])),
    "another shape": (422, changed(shape=[2, WIDTH])),
    "another nested shape": (422, changed(shape=[2, 6], data=ROWS.tolist())),
    "wrong width": (422, changed(shape=[2, 6])),
    "no data": (422, changed(data=None)),
    "strings": (422, changed(data=["1"] * 12)),
    "booleans": (422, changed(data=[True] * 12)),
    "too large": (422, changed(data=[1e39] * 12)),
    "parameters": (422, request(parameters=[])),
    "k": (422, request(parameters={"k": "3"})),
    "k zero": (422, request(parameters={"k": 0})),
    "experts": (422, request(parameters={"experts": 1.5})),
    "unknown output": (422, request(outputs=[{"name": "other"}])),
    "outputs": (422, request(outputs={"name": "classes"})),
    "id": (422, request(id=1)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_errors_and_the_service_goes_on(http: httpx.Client, name: str) -> None:
    status, body = BAD[name]
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    response = http.post(INFER, content=content)
    assert_error(response, status)
    assert http.post(INFER, json=request()).status_code == 200


@pytest.mark.parametrize("length", ["0", "-1", "x", "9999", "9" * 40, ""])
def test_a_wrong_length_of_the_json_part_is_400(http: httpx.Client, length: str) -> None:
    content, _ = binary_request()
    assert_error(http.post(INFER, content=content, headers={LENGTH: length}), 400)


@pytest.mark.parametrize("cut", [-4, 4])
def test_a_tensor_of_another_size_is_400(http: httpx.Client, cut: int) -> None:
    content, headers = binary_request()
    content = content[:cut] if cut < 0 else content + bytes(cut)
    assert_error(http.post(INFER, content=content, headers=headers), 400)


def test_a_tensor_that_nothing_announces_is_400(http: httpx.Client) -> None:
    head = orjson.dumps(request())
    headers = {LENGTH: str(len(head))}
    assert_error(http.post(INFER, content=head + bytes(48), headers=headers), 400)


def test_not_a_number_is_422(http: httpx.Client) -> None:
    content, headers = binary_request(np.full((1, WIDTH), np.nan, np.float32))
    error = assert_error(http.post(INFER, content=content, headers=headers), 422)
    assert error == "inputs[0][0] is a NaN or an infinity."


@pytest.mark.parametrize("kind", ["f2", "f8"])
def test_other_floats_are_taken_as_float32(http: httpx.Client, engine: Engine, kind: str) -> None:
    for padding in range(2):
        content, headers = binary_request(ROWS.astype(kind), padding, parameters={"k": 4})
        assert_answers(tensors(http.post(INFER, content=content, headers=headers)), engine, 4, 1)


@pytest.mark.parametrize(
    ("kind", "value"), [("f2", np.inf), ("f2", np.nan), ("f8", np.nan), ("f8", 1e39)]
)
def test_what_no_float32_can_be_is_422(http: httpx.Client, kind: str, value: float) -> None:
    content, headers = binary_request(np.full((2, WIDTH), value, kind))
    error = assert_error(http.post(INFER, content=content, headers=headers), 422)
    assert error.startswith("inputs[0][0] is ")


def test_an_answer_holds_each_output_once(http: httpx.Client) -> None:
    outputs = [{"name": "classes"}] * 2
    error = assert_error(http.post(INFER, json=request(outputs=outputs)), 422)
    assert error == "An output is asked for twice."


def test_unknown_parameters_are_ignored(http: httpx.Client) -> None:
    parameters = {"priority": 1, "sequence_id": 5, "sequence_start": True, "mine": "x"}
    assert http.post(INFER, json=request(parameters=parameters)).status_code == 200


def test_a_request_says_how_long_it_will_wait(http: httpx.Client) -> None:
    for microseconds in (0, 20_000_000):
        response = http.post(INFER, json=request(parameters={"timeout": microseconds}))
        assert response.status_code == 200
    assert_error(http.post(INFER, json=request(parameters={"timeout": 1})), 504)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v2/models/nobody/infer", 404),
        ("POST", "/v2/models/tiny/versions/9/infer", 404),
        ("GET", "/v2/models/nobody", 404),
        ("GET", "/v2/models/nobody/ready", 404),
        ("GET", "/v2/models/tiny/versions/3", 404),
        ("GET", "/v2/models/nobody/config", 404),
        ("GET", "/v2/models/tiny/versions/9/config", 404),
        ("GET", "/v2/models/nobody/stats", 404),
        ("GET", "/v2/models/tiny/versions/9/stats", 404),
        ("GET", "/v2/models/nobody/trace/setting", 404),
        ("GET", "/v2/systemsharedmemory/region/r/status", 400),
        ("POST", "/v2/logging", 403),
        ("POST", "/v2/models/tiny/stats", 405),
        ("POST", "/v2/cudasharedmemory/region/r/register", 403),
        ("GET", "/v2/nothing", 404),
        ("GET", "/v2/models/tiny/infer", 405),
    ],
)
def test_what_is_not_there_is_an_error(
    http: httpx.Client, method: str, path: str, status: int
) -> None:
    assert_error(http.request(method, path), status)


def assert_error(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    document: dict[str, str] = response.json()
    assert list(document) == ["error"]
    assert document["error"].endswith(".")
    return document["error"]


def test_server_and_models_describe_themselves(http: httpx.Client) -> None:
    assert http.get("/v2").json()["name"] == "doubly-sparse-softmax"
    assert http.get("/v2/health/live").json() == {"live": True}
    assert http.get("/v2/health/ready").json() == {"ready": True}
    assert http.get("/v2/models/tiny/ready").json() == {"name": "tiny", "ready": True}
    assert http.get("/v2/models/tiny/versions/1/ready").status_code == 200
    model = http.get("/v2/models/tiny").json()
    assert model["versions"] == ["2", "1"]
    assert model["inputs"] == [{"name": "hidden", "datatype": "FP32", "shape": [-1, WIDTH]}]
    assert [output["name"] for output in model["outputs"]] == list(OUTPUTS)
    assert http.get("/v2/models/tiny/versions/1").json() == model


def test_the_configuration_is_what_triton_would_say(http: httpx.Client) -> None:
    config = http.get("/v2/models/tiny/config").json()
    assert (config["name"], config["max_batch_size"]) == ("tiny", 4096)
    assert config["input"] == [{"name": "hidden", "data_type": "TYPE_FP32", "dims": [WIDTH]}]
    assert config["output"] == [
        {"name": "classes", "data_type": "TYPE_INT64", "dims": [-1]},
        {"name": "log_probs", "data_type": "TYPE_FP32", "dims": [-1]},
        {"name": "experts", "data_type": "TYPE_INT64", "dims": []},
        {"name": "gates", "data_type": "TYPE_FP32", "dims": []},
    ]
    assert config["version_policy"] == {"latest": {"num_versions": 2}}
    facts = {name: fact["string_value"] for name, fact in config["parameters"].items()}
    assert (facts["n_classes"], facts["n_experts"]) == (str(N_CLASSES), "3")
    assert (facts["version"], facts["max_k"]) == ("2", str(N_CLASSES))
    older = http.get("/v2/models/tiny/versions/1/config").json()
    assert older["parameters"]["version"] == {"string_value": "1"}


def test_every_route_is_described(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    described = {path for path in paths if path.startswith("/v2")}
    for operations in (paths[path] for path in described):
        assert all(operation["tags"] == ["v2"] for operation in operations.values())
    for path in ("config", "stats", "versions/{version}/stats", "trace/setting", "infer"):
        assert f"/v2/models/{{name}}/{path}" in described
    assert {"/v2/models/stats", "/v2/logging", "/v2/systemsharedmemory/status"} <= described


# --- what the log shows ----------------------------------------------------------------------


def shown(settings: dict[str, Any]) -> list[bool]:
    names = ("log_verbose_level", "log_info", "log_warning", "log_error")
    return [bool(settings[name]) for name in names]


def test_the_log_level_is_changed_in_all_workers(models: Path, tmp_path: Path) -> None:
    env = {"DSS_ACCESS__OPEN_ADMIN": "true"}
    with (
        running(models, tmp_path / "log", "--workers", "2", env=env) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        assert shown(http.get("/v2/logging").json()) == [False, True, True, True]
        told = http.post("/v2/logging", json={"log_info": False}).json()
        assert shown(told) == [False, False, True, True]

        def of_each() -> list[dict[str, Any]]:
            """Each connection goes to the next worker."""
            return [httpx.get(f"{server.url}/v2/logging").json() for _ in range(4)]

        wait_until(lambda: all(settings == told for settings in of_each()))

        for _ in range(6):
            with httpx.Client(base_url=server.url) as other:
                assert other.post(INFER, json=request()).status_code == 200
        (stats,) = http.get("/v2/models/tiny/versions/2/stats").json()["model_stats"]
        assert stats["inference_stats"]["success"]["count"] == 6
        assert stats["inference_count"] == 6 * len(ROWS)
