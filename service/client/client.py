"""The blocking client."""

from time import sleep
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from service.client import address
from service.client.address import Verify
from service.client.answers import Answer
from service.client.connections import Connections
from service.client.core import Core, Pause, Send, Steps, Version, reply_limits
from service.client.errors import ClientError
from service.client.http1 import DEFAULT_LIMITS, Reply
from service.client.model_info import ExpertInfo, ModelInfo

T = TypeVar("T")


class Client:
    """Asks a server for top-k answers. Threads may share it; it keeps its connections open."""

    def __init__(
        self,
        url: str = "http://localhost:8000",
        model: str | None = None,
        version: Version | None = None,
        api_key: str | None = None,
        timeout: float = 10.0,
        retries: int = 4,
        verify: Verify = True,
        max_head_bytes: int = DEFAULT_LIMITS.head_bytes,
        max_body_bytes: int = DEFAULT_LIMITS.body_bytes,
    ) -> None:
        """
        `model` and `version` (a number or an alias) are used when a call names none. Without
        `api_key` that of DSS_API_KEY is sent. `timeout` is for a whole call: all its tries and
        parts. `retries` are made when the server is overloaded or cannot be reached. `verify` is
        the file of a certificate authority, an ssl.SSLContext, or False to trust any certificate.
        Of an answer no more than `max_head_bytes` and `max_body_bytes` are read.
        """
        where = address.parse(url)
        limits = reply_limits(max_head_bytes, max_body_bytes)
        self._core = Core(
            where, model=model, version=version, api_key=api_key, timeout=timeout, retries=retries
        )
        self._connections = Connections(where, address.tls_context(where, verify), limits)

    def topk(
        self,
        hidden: ArrayLike,
        k: int | None = 10,
        experts: int | None = None,
        model: str | None = None,
        version: Version | None = None,
        labels: bool = False,
        timeout: float | None = None,
        *,
        exact: bool = False,
        recall: float | None = None,
        rescore: bool = False,
    ) -> Answer:
        """The k most probable classes of each row.

        `hidden` is a row [D] or rows [B,D] of anything that numpy reads; a lone row is answered as
        a batch of one. More rows than one request may hold are sent in parts. `k` may be None:
        10, or all classes if there are fewer. `labels` asks for the class labels too.

        `experts` are searched for each row: without, one, or what the server's own promise needs.
        Instead one may ask for `exact` answers, for a `recall` above 0 and up to 1, or that what
        is found is ranked by the output layer (`rescore`, with `experts` too); then the answer
        says in `rungs` and `searched` how each row was answered, and of a recall in `promise`
        whether it holds.
        """
        return self._run(
            self._core.topk(
                hidden,
                k,
                experts,
                model,
                version,
                labels,
                timeout,
                exact=exact,
                recall=recall,
                rescore=rescore,
            )
        )

    def models(self, timeout: float | None = None) -> list[ModelInfo]:
        """Every model, with its versions and the bundles that were refused."""
        return self._run(self._core.models(timeout))

    def model(self, name: str | None = None, timeout: float | None = None) -> ModelInfo:
        """One model: the one named, or else this client's, or else the server's default."""
        return self._run(self._core.model(name, timeout))

    def experts(self, name: str | None = None, timeout: float | None = None) -> list[ExpertInfo]:
        """The classes of each expert of a model, and its work since the server started."""
        return self._run(self._core.experts(name, timeout))

    def samples(self, name: str | None = None, timeout: float | None = None) -> NDArray[np.float32]:
        """Hidden vectors [S,D] of the model's bundle, to try it with; there may be none."""
        return self._run(self._core.samples(name, timeout))

    def ready(self, timeout: float | None = None) -> bool:
        """Whether the server accepts requests now."""
        return self._run(self._core.ready(timeout))

    def close(self) -> None:
        self._connections.close()

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
            return self._connections.exchange(step.message, step.deadline, fresh=step.fresh)
        except ClientError as failure:
            return failure
