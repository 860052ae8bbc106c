"""Ray Serve: an HTTP proxy and one replica, each in a process of its own; bare floats in and out.

python -m benchmarks.peers.ray.serve PORT
"""

import logging
import signal
import sys

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.peers import answers


@serve.deployment(num_replicas=1, max_ongoing_requests=256, ray_actor_options={"num_cpus": 1})
class TopK:
    def __init__(self) -> None:
        self.answer = answers.load()

    async def __call__(self, request: Request) -> Response:
        return Response(answers.joined(self.answer(answers.rows(await request.body()))))


def main(port: str) -> None:
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.WARNING)
    serve.start(
        http_options={"host": "127.0.0.1", "port": int(port)},
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    serve.run(TopK.bind())
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main(sys.argv[1])
