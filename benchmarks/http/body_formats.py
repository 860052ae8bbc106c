"""How rows go into a request and classes come out of an answer, for each kind of body.

B rows, D hidden, k answers.
"""

import base64
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import orjson
from numpy.typing import NDArray

from benchmarks.peers.answers import K

Rows = NDArray[np.float32]  # [B,D]
Classes = NDArray[np.int64]  # [B,k]
Headers = Mapping[str, str]  # named in lower case

JSON, NPY, BYTES = "application/json", "application/x-npy", "application/octet-stream"
HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class Wire:
    path: str
    content_type: str
    encode: Callable[[Rows], bytes]
    decode: Callable[[bytes, Headers], Classes]  # of an answer's body and headers

    def headers(self, hidden: Rows) -> dict[str, str]:
        headers = {"Content-Type": self.content_type}
        if self.encode is _encode_npy:
            headers["Accept"] = NPY
        if self.encode is _encode_v2_binary:
            headers[HEADER_LENGTH] = str(len(_v2_binary_head(hidden)))
        return headers


# --- this service ----------------------------------------------------------------------------


def _encode_npy(hidden: Rows) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, hidden, allow_pickle=False)
    return buffer.getvalue()


def _decode_npy(body: bytes, _: Headers) -> Classes:
    found: Classes = np.load(io.BytesIO(body), allow_pickle=False)["classes"]
    return found


def _encode_json(hidden: Rows) -> bytes:
    return orjson.dumps({"inputs": hidden, "k": K}, option=orjson.OPT_SERIALIZE_NUMPY)


def _decode_json(body: bytes, _: Headers) -> Classes:
    return np.array(orjson.loads(body)["classes"])


# --- others ----------------------------------------------------------------------------------


def _encode_raw(hidden: Rows) -> bytes:
    return hidden.tobytes()


def _decode_raw(body: bytes, _: Headers) -> Classes:
    """Classes, int64, then as many scores, float32."""
    count = len(body) // (8 + 4)
    return np.frombuffer(body, np.int64, count).reshape(-1, K)


def _encode_base64(hidden: Rows) -> bytes:
    return orjson.dumps({"inputs": base64.b64encode(hidden.tobytes()).decode()})


def _decode_base64(body: bytes, headers: Headers) -> Classes:
    return _decode_raw(base64.b64decode(body.strip(b'"')), headers)


def _encode_v2_binary(hidden: Rows) -> bytes:
    return _v2_binary_head(hidden) + hidden.tobytes()


def _v2_binary_head(hidden: Rows) -> bytes:
    tensor = {
        "name": "hidden",
        "shape": hidden.shape,
        "datatype": "FP32",
        "parameters": {"binary_data_size": hidden.nbytes},
    }
    return orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})


def _decode_v2_binary(body: bytes, headers: Headers) -> Classes:
    length = int(headers[HEADER_LENGTH.lower()])
    first = length
    for output in json.loads(body[:length])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        if output["name"] == "classes":
            return np.frombuffer(body[first : first + size], np.int64).reshape(output["shape"])
        first += size
    raise KeyError("classes")


def _encode_v2_json(hidden: Rows) -> bytes:
    tensor = {"name": "hidden", "shape": hidden.shape, "datatype": "FP32", "data": hidden.ravel()}
    return orjson.dumps({"inputs": [tensor]}, option=orjson.OPT_SERIALIZE_NUMPY)


def _decode_v2_json(body: bytes, _: Headers) -> Classes:
    outputs = {output["name"]: output for output in json.loads(body)["outputs"]}
    return np.array(outputs["classes"]["data"]).reshape(outputs["classes"]["shape"])


def _encode_v2_base64(hidden: Rows) -> bytes:
    tensor = {
        "name": "hidden",
        "shape": [1],
        "datatype": "BYTES",
        "parameters": {"content_type": "base64"},
        "data": [base64.b64encode(hidden.tobytes()).decode()],
    }
    return orjson.dumps({"inputs": [tensor]})


def _decode_v2_base64(body: bytes, headers: Headers) -> Classes:
    data = json.loads(body)["outputs"][0]["data"]
    return _decode_raw(base64.b64decode(data[0]), headers)


INFER = "/v2/models/topk/infer"

WIRES = {
    "npy": Wire(f"/topk?k={K}", NPY, _encode_npy, _decode_npy),
    "json": Wire("/topk", JSON, _encode_json, _decode_json),
    "raw": Wire("/inference", BYTES, _encode_raw, _decode_raw),
    "base64": Wire("/topk", JSON, _encode_base64, _decode_base64),
    "v2 binary": Wire(INFER, BYTES, _encode_v2_binary, _decode_v2_binary),
    "v2 json": Wire(INFER, JSON, _encode_v2_json, _decode_v2_json),
    "v2 base64": Wire(INFER, JSON, _encode_v2_base64, _decode_v2_base64),
}
