"""What is counted of HTTP requests: those answered, rejected and denied."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from typing import cast

import numpy as np
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from service.engine.kernels import call_counts
from service.engine.kernels.call_counts import SECONDS
from service.shared_state.counters import Counters, Key, Values

# What a block counts: the first part of its key.
HTTP, REJECTED, DENIED = "http", "rejected", "denied"


class HttpCounter:
    """The answers of one route, method and status. Only the event loop may count here."""

    __slots__ = ("_histogram",)

    def __init__(self, values: Values) -> None:
        # A memoryview: indexing an array would cost twice as much.
        self._histogram = cast(MutableSequence[float], values.data)

    def answered(self, seconds: float) -> None:
        histogram = self._histogram
        histogram[0] += seconds
        histogram[bisect_left(SECONDS, seconds) + 1] += 1.0


class HttpMetrics:
    """Routes, methods and statuses are few, so each counter is looked up once and kept."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._kept: dict[tuple[str, str, int], HttpCounter] = {}

    def counter(self, route: str, method: str, status: int) -> HttpCounter:
        counter = self._kept.get((route, method, status))
        if counter is None:
            key = (HTTP, route, method, str(status))
            counter = HttpCounter(self._counters.block(key, call_counts.HISTOGRAM))
            self._kept[route, method, status] = counter
        return counter

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        self.counter(route, method, status).answered(seconds)


def http_families(counted: Mapping[Key, Values]) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "dss_http_requests_total", "HTTP requests answered.", labels=("route", "method", "status")
    )
    seconds = HistogramMetricFamily(
        "dss_http_request_seconds", "From the request's head to its answer's.", labels=("route",)
    )
    rejected = CounterMetricFamily(
        "dss_rejected_requests_total",
        "Top-k requests not answered, by reason; the model is empty if none was found.",
        labels=("model", "reason"),
    )
    denied = CounterMetricFamily(
        "dss_denied_requests_total", "Requests refused for want of a key.", labels=("reason",)
    )
    by_route: dict[str, Values] = {}
    for (what, *labels), values in counted.items():
        if what == HTTP:
            requests.add_metric(labels, float(values[1:].sum()))
            by_route[labels[0]] = values + by_route.get(labels[0], 0.0)
        elif what == REJECTED:
            rejected.add_metric(labels, float(values[0]))
        elif what == DENIED:
            denied.add_metric(labels, float(values[0]))
    for route, values in by_route.items():
        add_histogram(seconds, (route,), values, SECONDS)
    yield requests
    yield seconds
    yield rejected
    yield denied


def add_histogram(
    family: HistogramMetricFamily, labels: Sequence[str], values: Values, bounds: Sequence[float]
) -> None:
    """A sum and a count for each bucket, as the cumulative counts that Prometheus reads."""
    names = [*map(floatToGoString, bounds), "+Inf"]
    cumulative = np.cumsum(values[1:]).tolist()
    family.add_metric(labels, list(zip(names, cumulative, strict=True)), sum_value=float(values[0]))
