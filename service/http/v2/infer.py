"""Documents POST .../infer. Its bodies are read from raw bytes, so they are described by hand."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from service.http import codecs
from service.http.inference import routes
from service.http.openapi import BINARY, ref
from service.http.v2 import schemas
from service.http.v2.responses import v2_responses


def add_routes(app: FastAPI) -> None:
    routes.declare(app, "v2", **INFER)


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
                codecs.JSON: {"schema": ref(schemas.V2Answer)},
                OCTETS: {"schema": BINARY | {"description": "JSON, then the binary outputs."}},
            },
        },
        **v2_responses(400, 404, 408, 409, 413, 415, 422, 429, 500, 503, 504),
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
                codecs.JSON: {"schema": ref(schemas.V2Request)},
                OCTETS: {"schema": BINARY | {"description": "JSON, then the rows, little-endian."}},
            },
        },
    },
}
