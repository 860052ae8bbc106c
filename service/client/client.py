"""The client that waits."""

from time import sleep
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from service.client import http1
from service.client.answers import Answer
from service.client.connections import Sockets
from service.client.core import Core, Pause, Send, Steps, Version
from service.client.errors import ClientError
from service.client.http1 import Reply, Verify
from service.client.model_info import ExpertInfo, ModelInfo

T = TypeVar("T")


class Client:
    """Asks a server. Threads may share it; it keeps its connections until it is closed."""

    def __init__(
        self,
        url: str = "http://localhost:8000",
        model: str | None = None,
        version: Version | None = None,
        api_key: str | None = None,
        timeout: float = 10.0,
        retries: int = 4,
        verify: Verify = True,
    ) -> None:
        """
        `model` and `version` (a number or a label) are asked when a call names none. `api_key` may
        come from DSS_API_KEY. `timeout` is for a whole call: all its tries and parts. `retries` are
        made when the server is overloaded or away. `verify` is the file of an authority, an
        ssl.SSLContext, or False to trust any certificate.
        """
        where = http1.address(url)
        self._core = Core(
            where, model=model, version=version, api_key=api_key, timeout=timeout, retries=retries
        )
        self._sockets = Sockets(where, http1.tls_context(where, verify))

    def topk(
        self,
        hidden: ArrayLike,
        k: int | None = 10,
        experts: int = 1,
        model: str | None = None,
        version: Version | None = None,
        labels: bool = False,
        timeout: float | None = None,
    ) -> Answer:
        """The k most probable classes of each row.

        `hidden` is a row [D] or rows [B,D] of anything that numpy reads; a lone row is answered as
        a batch of one. As many rows as you like: they are sent in parts if need be. `k` may be
        None, which is 10 or as many as there are. `labels` asks for the classes' names too.
        """
        return self._run(self._core.topk(hidden, k, experts, model, version, labels, timeout))

    def models(self, timeout: float | None = None) -> list[ModelInfo]:
        """Every model, with its versions and the bundles that were refused."""
        return self._run(self._core.models(timeout))

    def model(self, name: str | None = None, timeout: float | None = None) -> ModelInfo:
        """One model: the one named, or else this client's, or else the server's default."""
        return self._run(self._core.model(name, timeout))

    def experts(self, name: str | None = None, timeout: float | None = None) -> list[ExpertInfo]:
        """What each expert of a model holds, and what it has done since the server's start."""
        return self._run(self._core.experts(name, timeout))

    def samples(self, name: str | None = None, timeout: float | None = None) -> NDArray[np.float32]:
        """Hidden vectors [S,D] to try a model with, which its bundle carries; there may be none."""
        return self._run(self._core.samples(name, timeout))

    def ready(self, timeout: float | None = None) -> bool:
        """Whether the server takes requests now."""
        return self._run(self._core.ready(timeout))

    def close(self) -> None:
        self._sockets.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, steps: Steps[T]) -> T:
        outcome: object = None
        try:
            while True:
                step = steps.send(outcome)
                if isinstance(step, Send):
                    outcome = self._send(step)
                elif isinstance(step, Pause):
                    sleep(step.seconds)
                    outcome = None
                else:
                    outcome = [self._run(part) for part in step.parts]
        except StopIteration as done:
            result: T = done.value
            return result

    def _send(self, step: Send) -> Reply | ClientError:
        try:
            return self._sockets.exchange(step.message, step.deadline, fresh=step.fresh)
        except ClientError as failure:
            return failure
