"""The Open Inference Protocol, version 2, with Triton's binary tensors.

One input, `hidden`; k and experts are parameters of the request. The outputs are classes,
log_probs, experts and gates, all of them unless some are asked for by name.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import orjson
from fastapi import FastAPI, HTTPException
from fastapi.responses import Response
from numpy.typing import NDArray

from service import codecs, health, openapi, schemas
from service.batcher import Answered
from service.codecs import InvalidField, MalformedBody, MissingField, UnknownField
from service.errors import EmptyBatch, WrongWidth
from service.hot import Asked, Header, HotPath, Target
from service.model import Model
from service.state import State

INPUT = "hidden"
DATATYPES = {"classes": "INT64", "log_probs": "FP32", "experts": "INT64", "gates": "FP32"}
BYTES = {"INT64": 8, "FP32": 4}
JSON_HEADER = (b"content-type", b"application/json")
BINARY_HEADER = (b"content-type", b"application/octet-stream")
SHORT = 1024  # of a head whose meaning is worth keeping


class Output(NamedTuple):
    name: str
    binary: bool


class Wish(NamedTuple):
    """What the JSON part of a request says."""

    shape: tuple[int, int]
    data: list[Any] | None  # None: the tensor follows the JSON part
    k: int | None
    experts: int
    outputs: tuple[Output, ...]
    id: str | None


class InferPath(HotPath[bytes | None]):
    def read_head(self, headers: Iterable[Header], query_string: bytes) -> bytes | None:
        """Where the JSON part ends, if a tensor follows it."""
        del query_string
        json_length = None
        for name, value in headers:
            if name == b"inference-header-content-length":
                json_length = json_length or value
            elif name == b"content-encoding" and value.lower() != b"identity":
                raise codecs.UnsupportedMediaType(
                    "The body must be sent without a Content-Encoding."
                )
        return json_length

    def read_body(self, head: bytes | None, body: bytes) -> Asked:
        wish, hidden = decode(body, head)
        media_type = codecs.NPY if wish.data is None else codecs.JSON
        return Asked(hidden, wish.k, wish.experts, media_type, wish)

    def encode(
        self, head: bytes | None, asked: Asked, target: Target, answer: Answered
    ) -> tuple[list[Header], bytes]:
        del head
        content, json_length = encode(target.model, asked.wish, answer)
        headers = [(b"content-length", b"%d" % len(content))]
        if json_length == len(content):
            headers.append(JSON_HEADER)
        else:
            headers += [BINARY_HEADER, (b"inference-header-content-length", b"%d" % json_length)]
        return headers, content


# --- requests --------------------------------------------------------------------------------


def decode(body: bytes, json_length: bytes | None) -> tuple[Wish, NDArray[np.float32]]:
    """A request and its rows, [B,D]; `json_length` says where the JSON part ends."""
    head = body
    if json_length is not None:
        end = int(json_length) if json_length.isdigit() and len(json_length) < 12 else 0
        if not 0 < end <= len(body):
            raise MalformedBody("Inference-Header-Content-Length must be the length of the JSON.")
        head = body[:end]
    tail = len(body) - len(head)
    wish = _read_short(head, tail) if len(head) <= SHORT else _read(head, tail)
    if wish.data is not None:
        return wish, _rows(wish.data, wish.shape)
    hidden: NDArray[np.float32] = np.ndarray(wish.shape, np.float32, body, len(head))
    # The JSON part may be of any length, so that the tensor lies at an odd address.
    return wish, hidden if hidden.flags.aligned else hidden.copy()


def _read(head: bytes, tail: int) -> Wish:
    """The JSON part of a request that `tail` bytes follow."""
    document = codecs.parse_json(head)
    if not isinstance(document, dict):
        raise InvalidField("The JSON part must be an object with the field 'inputs'.")
    tensor = _only_input(document)
    shape = tensor.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or any(type(n) is not int for n in shape):
        raise InvalidField(f"The shape of {INPUT!r} must be [rows, width].")
    rows, width = shape
    if rows < 1:
        raise EmptyBatch(f"{INPUT!r} holds no row.")
    if width < 1:
        raise WrongWidth(f"The rows of {INPUT!r} are empty.")
    size = _parameters(tensor).get("binary_data_size")
    if size is None:
        if tail:
            raise MalformedBody(f"{tail} bytes follow the JSON part, which no input announces.")
        if not isinstance(tensor.get("data"), list):
            raise MissingField(f"The field 'data' of {INPUT!r} is missing.")
    elif size != tail or tail != rows * width * 4:
        raise MalformedBody(
            f"{INPUT!r} has {rows} x {width} values of 4 bytes and announces {size!s:.20} bytes;"
            f" {tail} follow the JSON part."
        )
    parameters = _parameters(document)
    name = document.get("id")
    if name is not None and not isinstance(name, str):
        raise InvalidField("'id' must be a string.")
    k = parameters.get("k")
    return Wish(
        (rows, width),
        None if size is not None else tensor["data"],
        None if k is None else codecs.count("k", k),
        codecs.count("experts", parameters.get("experts", 1)),
        _outputs(document, bool(parameters.get("binary_data_output", False))),
        name,
    )


# Clients with binary tensors send the same few JSON parts again and again.
_read_short = lru_cache(maxsize=256)(_read)


def _only_input(document: dict[str, Any]) -> dict[str, Any]:
    inputs = document.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise InvalidField(f"'inputs' must be a list of one tensor, {INPUT!r}.")
    tensor: dict[str, Any] = inputs[0]
    if tensor.get("name") != INPUT:
        raise UnknownField(f"There is one input, {INPUT!r}.")
    if tensor.get("datatype") != "FP32":
        raise InvalidField(f"The datatype of {INPUT!r} must be FP32.")
    return tensor


def _outputs(document: dict[str, Any], binary: bool) -> tuple[Output, ...]:
    asked = document.get("outputs")
    if asked is None or asked == []:
        return tuple(Output(name, binary) for name in DATATYPES)
    if not isinstance(asked, list) or not all(isinstance(output, dict) for output in asked):
        raise InvalidField("'outputs' must be a list of tensors.")
    for output in asked:
        if output.get("name") not in tuple(DATATYPES):
            known = ", ".join(DATATYPES)
            raise UnknownField(f"There is no such output; the outputs are {known}.")
    return tuple(
        Output(output["name"], bool(_parameters(output).get("binary_data", binary)))
        for output in asked
    )


def _parameters(document: dict[str, Any]) -> dict[str, Any]:
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidField("'parameters' must be an object.")
    return parameters


def _rows(data: list[Any], shape: tuple[int, int]) -> NDArray[np.float32]:
    """JSON data of [B,D], flat or as rows."""
    rows, width = shape
    if data and not isinstance(data[0], list):
        if len(data) != rows * width:
            raise InvalidField(f"'data' has {len(data)} numbers; its shape says {rows * width}.")
        data = [data[start : start + width] for start in range(0, len(data), width)]
    hidden = codecs.rows(data, suspicious=True)
    if hidden.shape != shape:
        raise InvalidField(f"'data' has shape {list(hidden.shape)}, not {list(shape)}.")
    return hidden


# --- answers ---------------------------------------------------------------------------------


def encode(model: Model, wish: Wish, answer: Answered) -> tuple[bytes, int]:
    """The answer, and the length of its JSON part."""
    rows, k = answer.classes.shape
    if wish.id is None and all(output.binary for output in wish.outputs):
        head = _binary_head(model.name, model.version, wish.outputs, rows, k)
    else:
        head = _head(model.name, model.version, wish.outputs, rows, k, wish.id, answer)
    tensors = [getattr(answer, output.name).tobytes() for output in wish.outputs if output.binary]
    return b"".join((head, *tensors)), len(head)


@lru_cache(maxsize=256)
def _binary_head(name: str, version: int, outputs: Sequence[Output], rows: int, k: int) -> bytes:
    """The JSON part of an answer whose tensors all follow it."""
    return _head(name, version, outputs, rows, k, None, None)


def _head(
    name: str,
    version: int,
    outputs: Sequence[Output],
    rows: int,
    k: int,
    asked_id: str | None,
    answer: Answered | None,
) -> bytes:
    tensors = []
    for output in outputs:
        datatype = DATATYPES[output.name]
        shape = [rows, k] if output.name in ("classes", "log_probs") else [rows]
        tensor: dict[str, Any] = {"name": output.name, "datatype": datatype, "shape": shape}
        if output.binary:
            size = int(np.prod(shape)) * BYTES[datatype]
            tensor["parameters"] = {"binary_data_size": size}
        else:
            tensor["data"] = np.ravel(getattr(answer, output.name))
        tensors.append(tensor)
    document: dict[str, Any] = {"model_name": name, "model_version": str(version)}
    if asked_id is not None:
        document["id"] = asked_id
    document["outputs"] = tensors
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


# --- everything but inference ----------------------------------------------------------------


def add_routes(app: FastAPI, state: State) -> None:
    _declare_inference(app)
    not_found = openapi.v2_responses(404, 503)
    not_ready = openapi.v2_responses(503)

    @app.get("/v2", tags=["v2"], responses=openapi.v2_responses())
    async def server() -> schemas.V2Server:
        """What this server is."""
        return schemas.V2Server(
            name="doubly-sparse-softmax", version=app.version, extensions=["binary_tensor_data"]
        )

    @app.get("/v2/health/live", tags=["v2"], responses=not_ready)
    async def live() -> schemas.V2Live:
        """Fails when only a restart helps."""
        health.check_live(state)
        return schemas.V2Live()

    @app.get("/v2/health/ready", tags=["v2"], responses=not_ready)
    async def ready() -> schemas.V2Ready:
        """Fails while requests should go elsewhere."""
        await health.check_ready(state)
        return schemas.V2Ready()

    @app.get("/v2/models/{name}", tags=["v2"], responses=not_found)
    async def model(name: str) -> schemas.V2Model:
        """The tensors of a model's newest good version."""
        return _metadata(state, name, None)

    @app.get("/v2/models/{name}/versions/{version}", tags=["v2"], responses=not_found)
    async def model_version(name: str, version: str) -> schemas.V2Model:
        """The tensors of one version of a model."""
        return _metadata(state, name, version)

    @app.get("/v2/models/{name}/ready", tags=["v2"], responses=not_found)
    async def model_ready(name: str) -> schemas.V2ModelReady:
        """Fails unless a model's newest good version answers."""
        return await _ready(state, name, None)

    @app.get("/v2/models/{name}/versions/{version}/ready", tags=["v2"], responses=not_found)
    async def version_ready(name: str, version: str) -> schemas.V2ModelReady:
        """Fails unless one version of a model answers."""
        return await _ready(state, name, version)


def _declare_inference(app: FastAPI) -> None:
    """For the document, and so that other methods are answered with 405; InferPath answers."""

    @app.post("/v2/models/{name}/infer", **openapi.INFER)
    async def infer(name: str) -> Response:
        """The k most probable classes for each row, by the newest good version of a model."""
        del name
        raise HTTPException(404)

    @app.post("/v2/models/{name}/versions/{version}/infer", **openapi.INFER)
    async def version_infer(name: str, version: str) -> Response:
        """The k most probable classes for each row, by one version of a model."""
        del name, version
        raise HTTPException(404)


def _metadata(state: State, name: str, version: str | None) -> schemas.V2Model:
    model = state.repository.get(name, version)
    width = model.manifest.hidden_size
    return schemas.V2Model(
        name=model.name,
        versions=[str(number) for number in state.repository.entry(name).versions],
        platform="doubly_sparse_softmax",
        inputs=[schemas.V2Tensor(name=INPUT, datatype="FP32", shape=[-1, width])],
        outputs=[
            schemas.V2Tensor(name=output, datatype=datatype, shape=_shape(output))
            for output, datatype in DATATYPES.items()
        ],
    )


def _shape(output: str) -> list[int]:
    return [-1, -1] if output in ("classes", "log_probs") else [-1]


async def _ready(state: State, name: str, version: str | None) -> schemas.V2ModelReady:
    model = state.repository.get(name, version)
    if not await model.batcher.healthy():
        raise health.NotReady(f"The engine of model {model.name}/{model.version} fails.")
    return schemas.V2ModelReady(name=model.name)
