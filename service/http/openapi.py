"""The OpenAPI document. Top-k bodies are read from raw bytes, so they are described by hand."""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import numpy as np
import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service.http import codecs, problems, schemas
from service.http.v2 import schemas as schemas_v2
from service.repository.model import DEFAULT_K, Model

DESCRIPTION = """\
Top-k classes of a large softmax layer, answered by a doubly sparse layer: a gate chooses an
expert for each row, and the expert holds only the classes it needs.

Every failure is an `application/problem+json` document (RFC 9457).
"""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
EXAMPLE_K = 3
BINARY = {"type": "string", "format": "binary"}

MEANING = {
    400: "The body is not what its headers say, or asks for what this server does not have.",
    401: "No API key, or one that is not known.",
    403: "The API key's scopes do not cover this.",
    404: "There is no such model, version, expert or class.",
    406: "The Accept header allows neither kind of answer.",
    409: "A label cannot be moved: its version is not good, or the folder is read-only.",
    408: "The body took too long to arrive.",
    413: "The body, the number of rows or the answer would be too large.",
    415: "The Content-Type or the Content-Encoding is not one that can be read.",
    422: "A parameter is wrong, or the arrays are: width, type, a NaN or infinity, k or experts.",
    429: "A queue is full; Retry-After says when to come back.",
    500: "The server failed; its log says why.",
    503: "The server is loading, draining or broken; Retry-After says when to come back.",
    504: "The answer could not be given before the request's deadline.",
}


def _ref(model: type[Any]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The listed problems, and `default` for those any route can have (405, 500)."""
    content = {problems.MEDIA_TYPE: {"schema": _ref(schemas.Problem)}}
    responses: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        responses[status] = {"description": MEANING[status], "content": content}
        if HTTPStatus(status) in problems.WORTH_RETRYING:
            seconds = {"description": "Seconds", "schema": {"type": "integer"}}
            responses[status]["headers"] = {"Retry-After": seconds}
    responses["default"] = {"description": "Any other problem.", "content": content}
    return responses


def v2_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The same problems, as the Open Inference Protocol has them."""
    responses = problem_responses(*statuses)
    for response in responses.values():
        response["content"] = {problems.V2_MEDIA_TYPE: {"schema": _ref(schemas_v2.V2Problem)}}
    return responses


def json_body(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """A body that a route reads by itself, for its `openapi_extra`."""
    content = {codecs.JSON: {"schema": _ref(model)}}
    return {"requestBody": {"required": required, "content": content}}


def _npy_parameter(name: str, default: int, text: str) -> dict[str, Any]:
    # No "default" in the schema: /docs would send it along with a JSON body, which is refused.
    return {
        "name": name,
        "in": "query",
        "required": False,
        "description": f"{text} {default} if absent. Only for {codecs.NPY} bodies.",
        "schema": {"type": "integer", "minimum": 1},
    }


TOPK: Mapping[str, Any] = {
    "tags": ["top-k"],
    "summary": "Top-k",
    "response_class": Response,
    "responses": {
        200: {
            "description": "The answer, in the media type that Accept prefers.",
            "headers": {
                "DSS-Model": {"schema": {"type": "string"}},
                "DSS-Model-Version": {"schema": {"type": "integer"}},
            },
            "content": {
                codecs.JSON: {"schema": _ref(schemas.TopKAnswer)},
                codecs.NPY: {
                    "schema": BINARY
                    | {
                        "description": "One record per row with the fields classes (int64 [k]),"
                        " log_probs (float32 [k]), experts (int64) and gates (float32):"
                        ' np.load(io.BytesIO(body))["classes"] is [rows, k].'
                    }
                },
            },
        },
        **problem_responses(400, 404, 406, 408, 413, 415, 422, 429, 500, 503, 504),
    },
    "openapi_extra": {
        "parameters": [
            _npy_parameter("k", DEFAULT_K, "How many classes to answer for each row."),
            _npy_parameter("experts", 1, "How many experts to search."),
        ],
        "requestBody": {
            "required": True,
            "content": {
                codecs.JSON: {"schema": _ref(schemas.TopKRequest)},
                codecs.NPY: {
                    "schema": BINARY
                    | {
                        "description": "A .npy file: float32, float16 or float64, two-dimensional,"
                        " C order, one row for each query."
                    }
                },
            },
        },
    },
}

OCTETS = "application/octet-stream"
JSON_LENGTH = "Inference-Header-Content-Length"
INFER: Mapping[str, Any] = {
    "tags": ["v2"],
    "summary": "Inference",
    "response_class": Response,
    "responses": {
        200: {
            "description": "The outputs, in JSON or after it.",
            "headers": {
                JSON_LENGTH: {
                    "description": "Where the JSON part ends, if tensors follow it",
                    "schema": {"type": "integer"},
                }
            },
            "content": {
                codecs.JSON: {"schema": _ref(schemas_v2.V2Answer)},
                OCTETS: {"schema": BINARY | {"description": "JSON, then the binary outputs."}},
            },
        },
        **v2_responses(400, 404, 408, 413, 415, 422, 429, 500, 503, 504),
    },
    "openapi_extra": {
        "parameters": [
            {
                "name": JSON_LENGTH,
                "in": "header",
                "required": False,
                "description": "Where the JSON part ends, if a tensor follows it.",
                "schema": {"type": "integer", "minimum": 1},
            }
        ],
        "requestBody": {
            "required": True,
            "content": {
                codecs.JSON: {"schema": _ref(schemas_v2.V2Request)},
                OCTETS: {"schema": BINARY | {"description": "JSON, then the rows, little-endian."}},
            },
        },
    },
}

METRICS: Mapping[str, Any] = {
    "response_class": Response,
    "responses": {
        200: {
            "description": "The Prometheus text format.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
        **problem_responses(),
    },
}


@dataclass(frozen=True)
class Example:
    """A request that works as it stands on the default model, and what it was answered."""

    request: dict[str, Any]
    answer: dict[str, Any]


def example(model: Model) -> Example:
    row = np.zeros(model.engine.hidden_size) if model.samples is None else model.samples[0]
    inputs = [[round(float(value), 4) for value in row]]
    k = min(EXAMPLE_K, model.engine.n_reachable)
    result = model.engine.topk(np.array(inputs, np.float32), k)
    return Example(
        request={"inputs": inputs, "k": k, "experts": 1},
        answer=orjson.loads(codecs.encode_json(model.source, result)),
    )


def build(app: FastAPI, shown: Example | None) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes
    )
    described: list[type[BaseModel]] = [
        schemas.TopKRequest,
        schemas.TopKAnswer,
        schemas.Problem,
        schemas.LabelRequest,
        schemas_v2.V2IndexRequest,
        schemas_v2.V2LoadRequest,
        schemas_v2.V2LogUpdate,
        schemas_v2.V2Request,
        schemas_v2.V2TraceUpdate,
        schemas_v2.V2UnloadRequest,
        schemas_v2.V2Answer,
        schemas_v2.V2Problem,
    ]
    _, definitions = models_json_schema(
        [(model, "validation") for model in described],
        ref_template="#/components/schemas/{model}",
    )
    document["components"]["schemas"] |= definitions["$defs"]
    # Keys are optional: a server without any answers everyone.
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    if shown is not None:
        for path, operations in document["paths"].items():
            if path.endswith("/topk"):
                topk = operations["post"]
                topk["requestBody"]["content"][codecs.JSON]["example"] = shown.request
                topk["responses"]["200"]["content"][codecs.JSON]["example"] = shown.answer
    return document
