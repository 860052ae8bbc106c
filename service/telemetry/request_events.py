"""What became of a request, and the interface of what logs and traces it."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Sampling(NamedTuple):
    """Whether a request is logged and traced. Decided once: its event carries it."""

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
    mode: str = ""  # exact, recall=0.99, rescore; empty: none
    escalated: int = 0  # rows scanned to keep a promised recall
    experts: NDArray[np.int64] | None = None  # [B] the gate's choices
    bytes_in: int = 0
    bytes_out: int = 0
    decoded: float = 0.0  # the body is read, and the request waits for the engine
    started: float = 0.0  # the engine's call, which other requests may have shared
    computed: float = 0.0  # its end
    gate_seconds: float = 0.0  # of that call
    expert_seconds: float = 0.0
    path: str = ""  # as the client wrote it; empty if it was not kept
    sampling: Sampling | None = None  # None: not decided yet


class RequestRecorder(Protocol):
    @property
    def records_successes(self) -> bool:
        """Whether requests that did not fail may be recorded; those with status 5xx always are."""

    @property
    def tracing(self) -> bool:
        """Whether there are traces."""

    def sample(
        self,
        status: int,
        seconds: float,
        traceparent: str | bytes | None = None,
        tracestate: str | bytes | None = None,
    ) -> Sampling | None:
        """Decide whether a request with this outcome is recorded; None, most often, is no.

        Call it before the work of making an event, once for each request, since it counts them:

            sampling = recorder.sample(status, seconds, traceparent, tracestate)
            if sampling is not None:
                recorder.record(RequestEvent(..., sampling=sampling))
        """

    def record(self, event: RequestEvent) -> None:
        """Called on the event loop, when the answer is handed to the connection.

        An event without a sampling is sampled here.
        """

    def close(self) -> None:
        """Write what is still kept in memory; waits for a moment at most."""


class NoRecorder:
    records_successes = tracing = False

    def sample(
        self,
        status: int,
        seconds: float,
        traceparent: str | bytes | None = None,
        tracestate: str | bytes | None = None,
    ) -> Sampling | None:
        del status, seconds, traceparent, tracestate
        return None

    def record(self, event: RequestEvent) -> None:
        pass

    def close(self) -> None:
        pass
