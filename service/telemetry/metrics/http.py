"""What is counted of HTTP requests: those answered, rejected and denied."""

from bisect import bisect_left
from collections.abc import Iterator, MutableSequence, Sequence
from typing import cast

import numpy as np
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from service.engine.kernels import call_counts
from service.engine.kernels.call_counts import SECONDS
from service.shared_state.counters import Counters, Key, Values

# What a sheet counts: the first part of its key.
HTTP, REJECTED, DENIED = "http", "rejected", "denied"


class HttpCounter:
    """The answers of one route, method and status. Only the event loop may count here."""

    __slots__ = ("_cells",)

    def __init__(self, values: Values) -> None:
        # Indexing an array would cost twice as much.
        self._cells = cast(MutableSequence[float], values.data)

    def answered(self, seconds: float) -> None:
        cells = self._cells
        cells[0] += seconds
        cells[bisect_left(SECONDS, seconds) + 1] += 1.0


class HttpMetrics:
    """Routes, methods and statuses are few, so what is looked up once is kept."""

    def __init__(self, cells: Counters) -> None:
        self._cells = cells
        self._kept: dict[tuple[str, str, int], HttpCounter] = {}

    def cell(self, route: str, method: str, status: int) -> HttpCounter:
        cell = self._kept.get((route, method, status))
        if cell is None:
            values = self._cells.block((HTTP, route, method, str(status)), call_counts.HISTOGRAM)
            cell = self._kept[route, method, status] = HttpCounter(values)
        return cell

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        self.cell(route, method, status).answered(seconds)


def http_families(counted: dict[Key, Values]) -> Iterator[Metric]:
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
    for (what, *labels), cells in counted.items():
        if what == HTTP:
            requests.add_metric(labels, float(cells[1:].sum()))
            by_route[labels[0]] = cells + by_route.get(labels[0], 0.0)
        elif what == REJECTED:
            rejected.add_metric(labels, float(cells[0]))
        elif what == DENIED:
            denied.add_metric(labels, float(cells[0]))
    for route, cells in by_route.items():
        add_histogram(seconds, (route,), cells, SECONDS)
    yield requests
    yield seconds
    yield rejected
    yield denied


def add_histogram(
    family: HistogramMetricFamily, labels: Sequence[str], cells: Values, bounds: Sequence[float]
) -> None:
    """A sum and a count for each bucket, as the cumulative counts that Prometheus reads."""
    names = [*map(floatToGoString, bounds), "+Inf"]
    cumulative = np.cumsum(cells[1:]).tolist()
    family.add_metric(labels, list(zip(names, cumulative, strict=True)), sum_value=float(cells[0]))
