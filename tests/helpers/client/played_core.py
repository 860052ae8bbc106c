"""The client's core without a server: a list answers its steps, and pauses pass at once."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from helpers.client.scripted_server import answer, top_k

from service.client import (
    ClientError,
    Unavailable,
    address,
)
from service.client.core import Clock, Core, Pause, Send, Steps
from service.client.http1 import DEFAULT_LIMITS, Reply, ReplyReader

ROW = np.ones((1, 4), np.float32)
START = 1000.0
TIME_OF_DAY = 1_800_000_000.0


def reply(raw: bytes) -> Reply:
    read = ReplyReader(DEFAULT_LIMITS).feed(raw)
    assert read is not None
    return read


def problem(status: int, slug: str = "", detail: str = "No.", **headers: str) -> Reply:
    kind = f"urn:dss:problem:{slug}" if slug else "about:blank"
    body = b'{"type": "%b", "title": "T", "detail": "%b"}' % (kind.encode(), detail.encode())
    return reply(answer(status, body, content_type="application/problem+json", **headers))


GOOD = reply(top_k())
FULL = problem(429, "queue-full", retry_after="1")
AWAY = Unavailable("No server answers.")


@dataclass
class Play:
    """Takes a core's steps: sends are answered from a list, pauses pass at once."""

    outcomes: Iterable[Reply | ClientError | Callable[[Send], Reply]] = ()
    chance: float = 1.0
    seconds_for_a_reply: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    now: float = START
    sends: list[Send] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        clock = Clock(lambda: self.now, lambda: TIME_OF_DAY, lambda: self.chance)
        where = address.parse("http://host:8000")
        self.core = Core(where, clock=clock, **self.settings)
        self._outcomes = iter(self.outcomes)

    def topk(self, hidden: Any = ROW, k: int | None = 2, **more: Any) -> Any:  # noqa: ANN401
        given = {"experts": 1, "model": None, "version": None, "labels": False, "timeout": None}
        return self.run(self.core.topk(hidden, k, **{**given, **more}))

    def run(self, steps: Steps[Any]) -> Any:  # noqa: ANN401
        outcome: Any = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as done:
                return done.value
            if isinstance(step, Send):
                self.sends.append(step)
                self.now += self.seconds_for_a_reply
                outcome = next(self._outcomes)
                if callable(outcome):
                    outcome = outcome(step)
            elif isinstance(step, Pause):
                self.pauses.append(step.seconds)
                self.now += step.seconds
                outcome = None
            else:
                outcome = [self.run(part) for part in step.parts]

    def heads(self) -> list[str]:
        return [send.message.partition(b"\r\n\r\n")[0].decode() for send in self.sends]

    def timeouts(self) -> list[str]:
        lines = [line for head in self.heads() for line in head.split("\r\n")]
        return [line.partition(": ")[2] for line in lines if line.startswith("DSS-Timeout")]
