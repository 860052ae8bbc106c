"""What kserve's client gets from a server: asked on stdin, answered on stdout, both as JSON.

A program of its own, because kserve needs older libraries than this project: test_kserve.py runs it
by a Python that has kserve. It must not import anything of the project.
"""

import asyncio
import json
import sys
from typing import Any

import httpx
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from kserve.protocol.infer_type import RequestedOutput


async def ask(url: str, rows: list[list[float]]) -> dict[str, Any]:
    client = InferenceRESTClient(RESTConfig(protocol="v2", retries=1, timeout=30))
    hidden = np.array(rows, np.float32)
    found: dict[str, Any] = {
        "live": await client.is_server_live(url),
        "ready": await client.is_server_ready(url),
        "model ready": await client.is_model_ready(url, "tiny"),
        "nobody ready": await client.is_model_ready(url, "nobody"),
    }
    for binary_in in (True, False):
        for binary_out in (True, False):
            answer = await client.infer(url, request(hidden, binary_in, binary_out), "tiny")
            found[f"infer {binary_in} {binary_out}"] = {
                "id": answer.id,
                "model": answer.model_name,
                "outputs": {output.name: output.as_numpy().tolist() for output in answer.outputs},
                "dtypes": {output.name: str(output.as_numpy().dtype) for output in answer.outputs},
            }
    halves = await client.infer(url, request(hidden.astype(np.float16), True, True), "tiny")
    found["half"] = halves.outputs[0].as_numpy().tolist()
    chosen = request(hidden, True, True, outputs=["gates"])
    found["chosen"] = [out.name for out in (await client.infer(url, chosen, "tiny")).outputs]
    try:
        await client.infer(url, request(hidden[:, :-1], True, True), "tiny")
    except httpx.HTTPStatusError as error:
        found["refused"] = [error.response.status_code, str(error)]
    await client.close()
    return found


def request(
    hidden: np.ndarray[Any, Any],
    binary_in: bool,
    binary_out: bool,
    outputs: list[str] | None = None,
) -> InferRequest:
    datatype = f"FP{8 * hidden.itemsize}"
    tensor = InferInput("hidden", list(hidden.shape), datatype)
    tensor.set_data_from_numpy(hidden, binary_data=binary_in)
    return InferRequest(
        "tiny",
        [tensor],
        request_id="mine",
        parameters={"k": 4, "experts": 2, "binary_data_output": binary_out},
        request_outputs=[RequestedOutput(name) for name in outputs or []],
    )


if __name__ == "__main__":
    told = json.load(sys.stdin)
    json.dump(asyncio.run(ask(told["url"], told["rows"])), sys.stdout)
