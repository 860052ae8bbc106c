"""What became of a request, told to whoever keeps logs or traces."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Event(NamedTuple):
    """One request, answered or not. Moments are of `perf_counter`; 0.0 is one never reached."""

    route: str  # the template, or "unmatched"
    method: str
    status: int
    request_id: str
    traceparent: str | None  # W3C, as it came
    tracestate: str | None
    arrived: float
    finished: float
    reason: str | None = None  # of a refusal: queue_full, wrong_width, ...
    # Of a top-k request, as far as it came:
    model: str = ""
    version: int = 0
    rows: int = 0
    k: int = 0
    searched: int = 0  # experts to search for each row
    experts: NDArray[np.int64] | None = None  # [B] the gate's choices
    bytes_in: int = 0
    bytes_out: int = 0
    decoded: float = 0.0  # the body is read, and the request waits for the engine
    started: float = 0.0  # the engine's call, which other requests may have shared
    computed: float = 0.0  # its end
    gate_seconds: float = 0.0  # of that call
    expert_seconds: float = 0.0


class Journal(Protocol):
    @property
    def watching(self) -> bool:
        """Whether good answers are of interest; failures with status 5xx always are."""

    def finished(self, event: Event) -> None:
        """Called on the event loop, after the answer has been handed to the connection."""


class NoJournal:
    watching = False

    def finished(self, event: Event) -> None:
        pass
