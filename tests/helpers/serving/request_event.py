"""The event of a top-k request that was answered."""

import numpy as np

from service.telemetry.request_events import RequestEvent

EVENT = RequestEvent(
    route="/models/{name}/topk",
    method="POST",
    status=200,
    request_id="mine",
    traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
    tracestate=None,
    arrived=10.0,
    finished=10.5,
    model="tiny",
    version=2,
    rows=4,
    k=3,
    searched=1,
    experts=np.array([7, 7, 2, 9]),
    bytes_in=100,
    bytes_out=200,
    decoded=10.1,
    started=10.2,
    computed=10.4,
    gate_seconds=0.05,
    expert_seconds=0.1,
    path="/models/tiny/topk",
)
