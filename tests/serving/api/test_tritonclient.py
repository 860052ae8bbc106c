"""Every call of Triton's own HTTP client, blocking and asynchronous, against a real server."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.server import Running, running
from helpers.tiny_bundle import N_CLASSES, WIDTH, rows_for, write_tiny
from numpy.typing import NDArray

from service import bundle
from service.engine import Engine

triton = pytest.importorskip("tritonclient.http")
aio = pytest.importorskip("tritonclient.http.aio")

pytestmark = pytest.mark.filterwarnings("default")  # its libraries warn about each other

ROWS = rows_for(0, 1, 2)
MANY = np.tile(ROWS, (50, 1))
OUTPUTS = {"classes": np.int64, "log_probs": np.float32, "experts": np.int64, "gates": np.float32}
DTYPES = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}
SECOND = 1_000_000  # Triton's timeouts are in microseconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of its own: they are loaded and unloaded here."""
    models = tmp_path_factory.mktemp("models")
    write_tiny(models / "tiny" / "1", seed=1)
    write_tiny(models / "tiny" / "2", seed=2)
    write_tiny(models / "spare" / "1", seed=3)
    (models / "tiny" / "labels.json").write_text('{"stable": 1, "canary": 2}')
    return models


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(bundle.read(folder / "tiny" / "2"))


@pytest.fixture(scope="module")
def own_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("server") / "log"
    env = {"DSS_ACCESS__OPEN_ADMIN": "true"}
    with running(folder, log, "--default-model", "tiny", env=env) as started:
        yield started


class Blocking:
    """The asynchronous client, each of whose calls is waited for."""

    def __init__(self, address: str) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(self._open(address))

    async def _open(self, address: str) -> Any:  # noqa: ANN401
        return aio.InferenceServerClient(address)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given, **named: self._runner.run(
            getattr(self._client, name)(*given, **named)
        )

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


@pytest.fixture(scope="module", params=["blocking", "asynchronous"])
def client(own_server: Running, request: pytest.FixtureRequest) -> Iterator[Any]:
    address = f"127.0.0.1:{own_server.port}"
    if request.param == "blocking":
        made = triton.InferenceServerClient(address)
    else:
        made = Blocking(address)
    yield made
    made.close()


def hidden(
    rows: NDArray[Any] = ROWS, kind: str = "FP32", *, binary: bool = True
) -> list[Any]:  # of one input
    tensor = triton.InferInput("hidden", list(rows.shape), kind)
    tensor.set_data_from_numpy(rows.astype(DTYPES[kind]), binary_data=binary)
    return [tensor]


def asked(*names: str, binary: bool = True) -> list[Any]:
    return [triton.InferRequestedOutput(name, binary_data=binary) for name in names]


def assert_answers(
    result: Any,  # noqa: ANN401
    engine: Engine,
    k: int = 10,
    experts: int = 1,
    rows: NDArray[np.float32] = ROWS,
) -> None:
    expected = engine.topk(rows, k, experts)
    for name, dtype in OUTPUTS.items():
        found = result.as_numpy(name)
        assert found.dtype == dtype
        assert found.shape == getattr(expected, name).shape
        np.testing.assert_allclose(found, getattr(expected, name), rtol=1e-5)
    np.testing.assert_array_equal(result.as_numpy("classes"), expected.classes)


def refused(call: Callable[[], object], status: int) -> str:
    """What the client says of an error: the server's own sentence, and its status."""
    with pytest.raises(triton.InferenceServerException) as failure:
        call()
    assert failure.value.status() == str(status), failure.value
    message: str = failure.value.message()
    assert "exception occurred in the client" not in message
    assert message.endswith(".")
    return message


# --- the server and its models ---------------------------------------------------------------


def test_health(client: Any) -> None:  # noqa: ANN401
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "1")
    assert client.is_model_ready("tiny", "stable")
    assert not client.is_model_ready("tiny", "9")
    assert not client.is_model_ready("nobody")


def test_metadata(client: Any) -> None:  # noqa: ANN401
    server = client.get_server_metadata()
    assert server["name"] == "doubly-sparse-softmax"
    assert set(server["extensions"]) == {
        "binary_tensor_data",
        "logging",
        "model_configuration",
        "model_repository",
        "parameters",
        "statistics",
    }
    model = client.get_model_metadata("tiny")
    assert model["versions"] == ["2", "1"]
    assert model["inputs"] == [{"name": "hidden", "datatype": "FP32", "shape": [-1, WIDTH]}]
    assert {output["name"]: output["shape"] for output in model["outputs"]} == {
        "classes": [-1, -1],
        "log_probs": [-1, -1],
        "experts": [-1],
        "gates": [-1],
    }
    assert client.get_model_metadata("tiny", "1") == model
    refused(lambda: client.get_model_metadata("nobody"), 404)
    refused(lambda: client.get_model_metadata("tiny", "9"), 404)


def test_configuration(client: Any) -> None:  # noqa: ANN401
    config = client.get_model_config("tiny")
    assert config["max_batch_size"] == 4096
    assert config["input"] == [{"name": "hidden", "data_type": "TYPE_FP32", "dims": [WIDTH]}]
    assert [output["name"] for output in config["output"]] == list(OUTPUTS)
    assert config["parameters"]["n_classes"]["string_value"] == str(N_CLASSES)
    assert config["parameters"]["version"]["string_value"] == "2"
    older = client.get_model_config("tiny", "stable")
    assert older["parameters"]["version"]["string_value"] == "1"
    refused(lambda: client.get_model_config("nobody"), 404)


# --- inference -------------------------------------------------------------------------------


@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("binary_in", [True, False])
def test_inference_in_all_mixes(
    client: Any,  # noqa: ANN401
    engine: Engine,
    binary_in: bool,
    binary_out: bool,
) -> None:
    for number in range(2):  # the second time its head is known
        result = client.infer(
            "tiny",
            hidden(binary=binary_in),
            outputs=asked(*OUTPUTS, binary=binary_out),
            request_id=f"request {number}",
            parameters={"k": 4, "experts": 2},
        )
        response = result.get_response()
        assert (response["model_name"], response["model_version"]) == ("tiny", "2")
        assert response["id"] == f"request {number}"
        assert_answers(result, engine, 4, 2)


def test_outputs_that_nobody_chose_are_all_there(client: Any, engine: Engine) -> None:  # noqa: ANN401
    assert_answers(client.infer("tiny", hidden()), engine)


def test_chosen_outputs(client: Any, engine: Engine) -> None:  # noqa: ANN401
    outputs = asked("gates", binary=False) + asked("classes")
    result = client.infer("tiny", hidden(), outputs=outputs, parameters={"k": 2})
    assert [output["name"] for output in result.get_response()["outputs"]] == ["gates", "classes"]
    np.testing.assert_array_equal(result.as_numpy("classes"), engine.topk(ROWS, 2, 1).classes)
    assert result.as_numpy("log_probs") is None


@pytest.mark.parametrize("version", ["1", "stable"])
def test_a_version_by_number_or_label(client: Any, folder: Path, version: str) -> None:  # noqa: ANN401
    result = client.infer("tiny", hidden(), model_version=version)
    assert result.get_response()["model_version"] == "1"
    assert_answers(result, Engine(bundle.read(folder / "tiny" / "1")))


@pytest.mark.parametrize(("kind", "binary"), [("FP16", True), ("FP64", True), ("FP64", False)])
def test_other_floats(client: Any, engine: Engine, kind: str, binary: bool) -> None:  # noqa: ANN401
    assert_answers(client.infer("tiny", hidden(ROWS, kind, binary=binary)), engine)


@pytest.mark.parametrize("out", ["gzip", "deflate", None])
@pytest.mark.parametrize("into", ["gzip", "deflate", None])
def test_compression(client: Any, engine: Engine, into: str | None, out: str | None) -> None:  # noqa: ANN401
    for binary in (True, False):
        result = client.infer(
            "tiny",
            hidden(MANY, binary=binary),
            outputs=asked(*OUTPUTS, binary=binary),
            request_compression_algorithm=into,
            response_compression_algorithm=out,
        )
        assert_answers(result, engine, rows=MANY)


def test_a_timeout_is_kept(client: Any, engine: Engine) -> None:  # noqa: ANN401
    assert_answers(client.infer("tiny", hidden(), timeout=20 * SECOND), engine)
    refused(lambda: client.infer("tiny", hidden(), timeout=1), 504)


def test_sequences_and_priorities_mean_nothing(client: Any, engine: Engine) -> None:  # noqa: ANN401
    result = client.infer(
        "tiny", hidden(), sequence_id=7, sequence_start=True, sequence_end=True, priority=3
    )
    assert_answers(result, engine)


def test_wrong_requests_are_told_why(client: Any, engine: Engine) -> None:  # noqa: ANN401
    assert "k is 0" in refused(lambda: client.infer("tiny", hidden(), parameters={"k": 0}), 422)
    assert "nobody" in refused(lambda: client.infer("nobody", hidden()), 404)
    refused(lambda: client.infer("tiny", hidden(), model_version="9"), 404)
    refused(lambda: client.infer("tiny", hidden(np.ones((1, 3)))), 422)
    refused(lambda: client.infer("tiny", hidden(np.full((1, WIDTH), np.nan))), 422)
    refused(lambda: client.infer("tiny", hidden(np.ones((5000, WIDTH)))), 413)
    refused(lambda: client.infer("tiny", hidden(), outputs=asked("other")), 422)
    refused(lambda: client.infer("tiny", hidden() * 2), 422)
    counted = [triton.InferRequestedOutput("log_probs", class_count=3)]
    assert "classification" in refused(lambda: client.infer("tiny", hidden(), outputs=counted), 400)
    shared = triton.InferInput("hidden", list(ROWS.shape), "FP32")
    shared.set_shared_memory("region", ROWS.nbytes)
    assert "shared memory" in refused(lambda: client.infer("tiny", [shared]), 400)
    assert_answers(client.infer("tiny", hidden()), engine)


def test_asynchronous_inference_of_the_blocking_client(own_server: Running, engine: Engine) -> None:
    with triton.InferenceServerClient(f"127.0.0.1:{own_server.port}", concurrency=4) as client:
        waiting = [
            client.async_infer("tiny", hidden(), request_id=str(number), parameters={"k": 3})
            for number in range(12)
        ]
        for number, request in enumerate(waiting):
            result = request.get_result()
            assert result.get_response()["id"] == str(number)
            assert_answers(result, engine, 3)
        wrong = client.async_infer("tiny", hidden(), parameters={"k": 0})
        refused(wrong.get_result, 422)


# --- statistics ------------------------------------------------------------------------------


def test_statistics(client: Any) -> None:  # noqa: ANN401
    def of(version: str = "2") -> dict[str, Any]:
        (found,) = client.get_inference_statistics("tiny", version)["model_stats"]
        assert (found["name"], found["version"]) == ("tiny", "2")
        return dict(found)

    before, began = of(), time.time()
    for _ in range(3):
        client.infer("tiny", hidden())
    refused(lambda: client.infer("tiny", hidden(), parameters={"k": 0}), 422)
    after = of("canary")
    assert began - 1 <= after["last_inference"] / 1000 <= time.time() + 1
    assert after["inference_count"] - before["inference_count"] == 3 * len(ROWS)
    assert after["execution_count"] - before["execution_count"] == 3
    grown = {
        name: {part: after["inference_stats"][name][part] - was[part] for part in ("count", "ns")}
        for name, was in before["inference_stats"].items()
    }
    for name in ("success", "queue", "compute_infer"):
        assert grown[name]["count"] == 3
    assert grown["fail"]["count"] == 1
    assert grown["fail"]["ns"] > 0
    assert 0 < grown["compute_infer"]["ns"] < 60e9
    spent = grown["queue"]["ns"] + grown["compute_infer"]["ns"]
    assert grown["success"]["ns"] == pytest.approx(spent, abs=4)
    for name in ("compute_input", "compute_output", "cache_hit", "cache_miss"):
        assert after["inference_stats"][name] == {"count": 0, "ns": 0}


def test_statistics_of_a_model_and_of_all(client: Any) -> None:  # noqa: ANN401
    def names(found: dict[str, Any]) -> set[tuple[str, str]]:
        return {(model["name"], model["version"]) for model in found["model_stats"]}

    versions = {("tiny", "1"), ("tiny", "2")}
    assert names(client.get_inference_statistics("tiny")) == versions
    assert names(client.get_inference_statistics()) == {*versions, ("spare", "1")}
    refused(lambda: client.get_inference_statistics("nobody"), 404)
    refused(lambda: client.get_inference_statistics("tiny", "9"), 404)


# --- settings --------------------------------------------------------------------------------


def test_log_settings(client: Any) -> None:  # noqa: ANN401
    usual = client.get_log_settings()
    assert usual == {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "ISO8601",
    }
    verbose = client.update_log_settings({"log_verbose_level": 2})
    assert verbose == client.get_log_settings() == {**usual, "log_verbose_level": 1}
    assert client.update_log_settings({"log_verbose_level": 0, "log_info": True}) == usual
    assert "log_file" in refused(lambda: client.update_log_settings({"log_file": "log"}), 400)
    refused(lambda: client.update_log_settings({"log_format": "default"}), 400)
    refused(lambda: client.update_log_settings({"log_info": "yes"}), 422)
    refused(lambda: client.update_log_settings({"other": 1}), 422)
    refused(lambda: client.update_log_settings([]), 422)
    assert client.get_log_settings() == usual


@pytest.mark.parametrize("model", [None, "tiny"])
def test_trace_settings(client: Any, model: str | None) -> None:  # noqa: ANN401
    settings = client.get_trace_settings(model)
    assert settings["trace_level"] == ["OFF"]
    assert client.update_trace_settings(model, {}) == settings
    assert client.update_trace_settings(model, {"trace_level": ["OFF"]}) == settings
    wanted = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
    assert "OTEL" in refused(lambda: client.update_trace_settings(model, wanted), 400)
    refused(lambda: client.get_trace_settings("nobody"), 404)


def test_there_is_no_shared_memory(client: Any) -> None:  # noqa: ANN401
    assert client.get_system_shared_memory_status() == []
    assert client.get_cuda_shared_memory_status() == []
    refused(lambda: client.get_system_shared_memory_status("region"), 400)
    refused(lambda: client.get_cuda_shared_memory_status("region"), 400)
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    client.unregister_system_shared_memory("region")
    client.unregister_cuda_shared_memory("region")
    sentence = "There is no shared memory"
    said = refused(lambda: client.register_system_shared_memory("region", "/key", 64), 400)
    assert said.startswith(sentence)
    said = refused(lambda: client.register_cuda_shared_memory("region", b"handle", 0, 64), 400)
    assert said.startswith(sentence)


# --- the repository --------------------------------------------------------------------------


def test_repository(client: Any) -> None:  # noqa: ANN401
    def ready() -> set[tuple[str, str]]:
        index = client.get_model_repository_index()
        return {(it["name"], it["version"]) for it in index if it["state"] == "READY"}

    everything = {("tiny", "1"), ("tiny", "2"), ("spare", "1")}
    assert ready() == everything
    client.unload_model("spare")
    assert ready() == everything - {("spare", "1")}
    assert not client.is_model_ready("spare")
    refused(lambda: client.infer("spare", hidden()), 404)
    client.load_model("spare")
    assert ready() == everything
    assert client.infer("spare", hidden()).get_response()["model_version"] == "1"
    refused(lambda: client.load_model("nobody"), 404)
