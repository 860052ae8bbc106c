"""LitServe: FastAPI in front, a worker process behind a queue.

    python -m benchmarks.peers.litserve.serve PORT

It reads JSON only, so that rows come as base64, which costs it least.
BATCH is how many requests the worker gathers; with 1 it takes each at once.
"""

import base64
import os
import sys

import litserve
import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import answers

BATCH = int(os.environ.get("HTTP_BENCH_BATCH", "1"))
SECONDS = 0.001


class TopK(litserve.LitAPI):
    def setup(self, device: str) -> None:
        del device
        self.answer = answers.load()

    def decode_request(self, request: dict[str, str]) -> NDArray[np.float32]:
        return answers.rows(base64.b64decode(request["inputs"]))

    def batch(self, inputs: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        return inputs

    def predict(
        self, x: NDArray[np.float32] | list[NDArray[np.float32]]
    ) -> answers.Found | list[answers.Found]:
        return answers.together(self.answer, x) if isinstance(x, list) else self.answer(x)

    def unbatch(self, output: list[answers.Found]) -> list[answers.Found]:
        return output

    def encode_response(self, output: answers.Found) -> str:
        return base64.b64encode(answers.joined(output)).decode()


if __name__ == "__main__":
    api = TopK(api_path="/topk", max_batch_size=BATCH, batch_timeout=SECONDS if BATCH > 1 else 0.0)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[1]),
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )
