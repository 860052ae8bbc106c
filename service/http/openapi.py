"""The OpenAPI document, and what its routes have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import numpy as np
import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service.http import codecs, problems, schemas
from service.repository.model import Model

DESCRIPTION = """\
Top-k classes of a large softmax layer, answered by a doubly sparse layer: a gate chooses an
expert for each row, and the expert holds only the classes it needs.

Every failure is an `application/problem+json` document (RFC 9457).
"""
EXAMPLE_K = 3
BINARY = {"type": "string", "format": "binary"}

MEANING = {
    400: "The body is not what its headers say, or asks for what this server does not have.",
    401: "No API key, or one that is not known.",
    403: "The API key's scopes do not cover this.",
    404: "There is no such model, version, expert or class.",
    406: "The Accept header allows neither kind of answer.",
    409: "A label cannot be moved: its version is not good, or the folder is read-only. Or recall"
    " is not promised while the traffic has drifted.",
    408: "The body took too long to arrive.",
    413: "The body, the number of rows or the answer would be too large.",
    415: "The Content-Type or the Content-Encoding is not one that can be read.",
    422: "A parameter is wrong, or the arrays are: width, type, a NaN or infinity, k or experts; or"
    " the model cannot answer exactly, or promise a recall.",
    429: "A queue is full; Retry-After says when to come back.",
    500: "The server failed; its log says why.",
    503: "The server is loading, draining or broken; Retry-After says when to come back.",
    504: "The answer could not be given before the request's deadline.",
}


def ref(model: type[Any]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The listed problems, and `default` for those any route can have (405, 500)."""
    content = {problems.MEDIA_TYPE: {"schema": ref(schemas.Problem)}}
    responses: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        responses[status] = {"description": MEANING[status], "content": content}
        if HTTPStatus(status) in problems.WORTH_RETRYING:
            seconds = {"description": "Seconds", "schema": {"type": "integer"}}
            responses[status]["headers"] = {"Retry-After": seconds}
    responses["default"] = {"description": "Any other problem.", "content": content}
    return responses


def json_body(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """A body that a route reads by itself, for its `openapi_extra`."""
    content = {codecs.JSON: {"schema": ref(model)}}
    return {"requestBody": {"required": required, "content": content}}


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


def build(
    app: FastAPI, described: Sequence[type[BaseModel]], shown: Example | None
) -> dict[str, Any]:
    """The whole document; `described` are the models of bodies that routes read by themselves."""
    document = get_openapi(
        title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes
    )
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
