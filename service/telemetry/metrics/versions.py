"""What is counted and shown about loading versions and moving version aliases."""

from collections.abc import Collection, Iterator, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, Metric

from service.shared_state.counters import Counters, Key, Values

LOADS = "loads"


class VersionMetrics:
    def __init__(self, registry: CollectorRegistry, counters: Counters) -> None:
        self._counters = counters
        # The same in every worker, so that each shows its own.
        self._refused = Gauge(
            "dss_refused_bundles",
            "1 for each bundle that could not be loaded.",
            ("model", "version"),
            registry=registry,
        )
        self._aliases = Gauge(
            "dss_model_label_version",
            "The version that a label points at.",
            ("model", "label"),
            registry=registry,
        )
        self._seconds = Gauge(
            "dss_model_load_seconds",
            "How long reading, checking and warming up took.",
            ("model", "version"),
            registry=registry,
        )

    def load_ended(self, model: str, result: Literal["loaded", "refused"]) -> None:
        """Called by the thread that loads, alone."""
        self._counters.block((LOADS, model, result), 1)[0] += 1

    def show_seconds(self, model: str, version: int, seconds: float) -> None:
        self._seconds.labels(model, str(version)).set(seconds)

    def show_refused(self, model: str, before: Collection[int], now: Collection[int]) -> None:
        for version in now:
            self._refused.labels(model, str(version)).set(1)
        for version in {*before} - {*now}:
            self._refused.remove(model, str(version))

    def show_labels(self, model: str, before: Collection[str], now: Mapping[str, int]) -> None:
        for label, version in now.items():
            self._aliases.labels(model, label).set(version)
        for label in {*before} - {*now}:
            self._aliases.remove(model, label)

    def forget(self, model: str, version: str) -> None:
        """A version is no longer loaded."""
        self._seconds.remove(model, version)


def load_families(counted: Mapping[Key, Values]) -> Iterator[Metric]:
    loads = CounterMetricFamily(
        "dss_model_loads_total",
        "Versions loaded or refused; every worker counts its own.",
        labels=("model", "result"),
    )
    for (what, *labels), values in counted.items():
        if what == LOADS:
            loads.add_metric(labels, float(values[0]))
    yield loads
