"""What became of a request, told to whoever keeps logs or traces."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Sampling(NamedTuple):
    """What shall be kept of a request. Decided once: the event carries it."""

    logged: bool
    trace_id: int  # 0: without a trace


class RequestEvent(NamedTuple):
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
    path: str = ""  # as the client wrote it; empty if nobody kept it
    wanted: Sampling | None = None  # what the journal said; None: it was not asked yet


class RequestRecorder(Protocol):
    @property
    def watching(self) -> bool:
        """Whether good answers are of interest; failures with status 5xx always are."""

    @property
    def tracing(self) -> bool:
        """Whether there are traces."""

    def wanted(
        self,
        status: int,
        seconds: float,
        traceparent: str | bytes | None = None,
        tracestate: str | bytes | None = None,
    ) -> Sampling | None:
        """What shall be kept of a request with this outcome; None, most often, is nothing.

        Ask before the work of making an event, once for each request, since asking counts it, and
        put what it says into the event:

            wanted = journal.wanted(status, seconds, traceparent, tracestate)
            if wanted is not None:
                journal.finished(Event(..., wanted=wanted))
        """

    def finished(self, event: RequestEvent) -> None:
        """Called on the event loop, when the answer is handed to the connection.

        An event that does not say what is wanted is sampled here.
        """

    def close(self) -> None:
        """Write what is still kept in memory; waits for a moment at most."""


class NoRecorder:
    watching = tracing = False

    def wanted(
        self,
        status: int,
        seconds: float,
        traceparent: str | bytes | None = None,
        tracestate: str | bytes | None = None,
    ) -> Sampling | None:
        del status, seconds, traceparent, tracestate
        return None

    def finished(self, event: RequestEvent) -> None:
        pass

    def close(self) -> None:
        pass
