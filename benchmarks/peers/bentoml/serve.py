"""BentoML: a service with one worker; rows come as base64, which costs it least.

bentoml serve benchmarks.peers.bentoml.serve:TopK --port 8000
"""

import base64

import bentoml

from benchmarks.peers import answers


@bentoml.service(
    workers=1,
    traffic={"timeout": 30, "max_concurrency": 256},
    logging={"access": {"enabled": False}},
    metrics={"enabled": False},
)
class TopK:
    def __init__(self) -> None:
        self.answer = answers.load()

    @bentoml.api
    async def topk(self, inputs: str) -> str:
        hidden = answers.rows(base64.b64decode(inputs))
        return base64.b64encode(answers.joined(self.answer(hidden))).decode()
