"""Documents POST .../topk. Its bodies are read from raw bytes, so they are described by hand."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from service.http import codecs, schemas
from service.http.inference import routes
from service.http.openapi import BINARY, problem_responses, ref
from service.repository.model import DEFAULT_K


def add_routes(app: FastAPI) -> None:
    routes.declare(app, "native", **TOPK)


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
                codecs.JSON: {"schema": ref(schemas.TopKAnswer)},
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
                codecs.JSON: {"schema": ref(schemas.TopKRequest)},
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
