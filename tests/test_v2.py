"""The Open Inference Protocol: by hand, and by the client that Triton's users have."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from numpy.typing import NDArray
from server import Running
from tiny import WIDTH, rows_for

from service import bundle
from service.engine import Engine

ROWS = rows_for(0, 1, 2)
INFER = "/v2/models/tiny/infer"
LENGTH = "inference-header-content-length"
OUTPUTS = {"classes": np.int64, "log_probs": np.float32, "experts": np.int64, "gates": np.float32}


@pytest.fixture(scope="module")
def engine(models: Path) -> Engine:
    return Engine(bundle.read(models / "tiny" / "2"))


def request(rows: NDArray[np.float32] = ROWS, **more: object) -> dict[str, Any]:
    tensor = {
        "name": "hidden",
        "shape": list(rows.shape),
        "datatype": "FP32",
        "data": rows.ravel().tolist(),
    }
    return {"inputs": [tensor], **more}


def binary_request(
    rows: NDArray[np.float32] = ROWS, padding: int = 0, **more: object
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


BAD: dict[str, tuple[int, object]] = {
    "not json": (400, b"{"),
    "a list": (422, []),
    "no inputs": (422, {}),
    "two inputs": (422, {"inputs": [{}, {}]}),
    "another input": (422, changed(name="other")),
    "another type": (422, changed(datatype="FP64")),
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


def test_compressed_bodies_are_415(http: httpx.Client) -> None:
    assert_error(http.post(INFER, json=request(), headers={"content-encoding": "gzip"}), 415)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v2/models/nobody/infer", 404),
        ("POST", "/v2/models/tiny/versions/9/infer", 404),
        ("GET", "/v2/models/nobody", 404),
        ("GET", "/v2/models/nobody/ready", 404),
        ("GET", "/v2/models/tiny/versions/3", 404),
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
    assert http.get("/v2").json()["extensions"] == ["binary_tensor_data"]
    assert http.get("/v2/health/live").json() == {"live": True}
    assert http.get("/v2/health/ready").json() == {"ready": True}
    assert http.get("/v2/models/tiny/ready").json() == {"name": "tiny", "ready": True}
    assert http.get("/v2/models/tiny/versions/1/ready").status_code == 200
    model = http.get("/v2/models/tiny").json()
    assert model["versions"] == ["2", "1"]
    assert model["inputs"] == [{"name": "hidden", "datatype": "FP32", "shape": [-1, WIDTH]}]
    assert [output["name"] for output in model["outputs"]] == list(OUTPUTS)
    assert http.get("/v2/models/tiny/versions/1").json() == model


# --- Triton's own client ---------------------------------------------------------------------


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("binary", [True, False])
def test_the_client_of_triton_gets_its_answers(
    server: Running, engine: Engine, binary: bool
) -> None:
    triton = pytest.importorskip("tritonclient.http")
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert not client.is_model_ready("nobody")
    assert client.get_model_metadata("tiny", "1")["name"] == "tiny"

    hidden = triton.InferInput("hidden", ROWS.shape, "FP32")
    hidden.set_data_from_numpy(ROWS, binary_data=binary)
    asked = [triton.InferRequestedOutput(name, binary_data=binary) for name in OUTPUTS]
    for outputs in (asked, None):
        result = client.infer(
            "tiny", [hidden], outputs=outputs, request_id="7", parameters={"k": 4, "experts": 2}
        )
        assert result.get_response()["id"] == "7"
        assert_answers({name: result.as_numpy(name) for name in OUTPUTS}, engine, 4, 2)
    with pytest.raises(triton.InferenceServerException, match="k is 0"):
        client.infer("tiny", [hidden], parameters={"k": 0})
    client.close()
