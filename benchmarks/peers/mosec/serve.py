"""mosec: a Rust front that gathers requests and hands them to a Python worker in batches.

    python -m benchmarks.peers.mosec.serve --port 8000

BATCH is how many requests it gathers; with more than one it waits up to a millisecond, its least.
"""

import os

import numpy as np
from mosec import Server, Worker
from numpy.typing import NDArray

from benchmarks.peers import answers

BATCH = int(os.environ.get("HTTP_BENCH_BATCH", "64"))
SHORTEST_WAIT_MS = 1


class TopK(Worker):
    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        self.answer = answers.load()

    def deserialize(self, data: bytes) -> NDArray[np.float32]:
        return answers.rows(data)

    def serialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: list[NDArray[np.float32]] | NDArray[np.float32]) -> list[bytes] | bytes:
        if not isinstance(data, list):  # mosec gives no list where it gathers none
            return answers.joined(self.answer(data))
        return [answers.joined(found) for found in answers.together(self.answer, data)]


if __name__ == "__main__":
    server = Server()
    server.append_worker(TopK, num=1, max_batch_size=BATCH, max_wait_time=SHORTEST_WAIT_MS)
    server.run()
