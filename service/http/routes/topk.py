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


WHOLE: Mapping[str, Any] = {"type": "integer", "minimum": 1}
SHARE: Mapping[str, Any] = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
SWITCH: Mapping[str, Any] = {"type": "boolean"}


def _npy_parameter(name: str, text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    # No "default" in the schema: /docs would send it along with a JSON body, which is refused.
    return {
        "name": name,
        "in": "query",
        "required": False,
        "description": f"{text} Only for {codecs.NPY} bodies.",
        "schema": dict(schema),
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
                "DSS-Promise": {
                    "description": "Of a recall, if one is asked for or usual: kept or withdrawn",
                    "schema": {"type": "string"},
                },
            },
            "content": {
                codecs.JSON: {"schema": ref(schemas.TopKAnswer)},
                codecs.NPY: {
                    "schema": BINARY
                    | {
                        "description": "One record per row with the fields classes (int64 [k]),"
                        " log_probs (float32 [k]), experts (int64) and gates (float32):"
                        ' np.load(io.BytesIO(body))["classes"] is [rows, k]. If exact, recall or'
                        " rescore is asked for also searched (int64) and rungs (a string)."
                    }
                },
            },
        },
        **problem_responses(400, 404, 406, 408, 409, 413, 415, 422, 429, 500, 503, 504),
    },
    "openapi_extra": {
        "parameters": [
            _npy_parameter(
                "k", f"How many classes to answer for each row. {DEFAULT_K} if absent.", WHOLE
            ),
            _npy_parameter("experts", "How many experts to search. 1 if absent.", WHOLE),
            _npy_parameter("exact", "Answer the k best of the whole output layer.", SWITCH),
            _npy_parameter("recall", "The share of these that must be found.", SHARE),
            _npy_parameter("rescore", "Rank what is found by the output layer.", SWITCH),
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
