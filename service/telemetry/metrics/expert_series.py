"""Which experts of a version have series of their own in /metrics; the others share one.

The experts that training used most have their own. The choice is made from the manifest, so it is
the same in every worker, after every restart and whatever the traffic: a counter that an expert
left or entered while it is scraped would go down or jump, and Prometheus would take the one for a
restart and the other for traffic.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from service.shared_state.counters import Values

OTHER = "other"


class ExpertSeries:
    def __init__(self, trained_utilization: Sequence[float], most: int | None) -> None:
        """`most` experts have their own series; None: all."""
        # Of experts used alike the one with the lower number comes first.
        by_use = np.argsort(-np.asarray(trained_utilization), kind="stable")
        self._own: NDArray[np.intp] = np.sort(by_use[:most])

    def of(self, values: Values) -> Iterator[tuple[str, Values]]:
        """The label and the values of each series, of values [K,...] that may be added up."""
        # A version that was replaced in its place may have had more experts, or fewer.
        own = self._own[self._own < len(values)]
        for expert in own.tolist():
            yield str(expert), values[expert]
        if len(own) < len(values):
            yield OTHER, np.delete(values, own, axis=0).sum(axis=0)

    def own(self, values: Values) -> Iterator[tuple[str, Values]]:
        """As `of`, of values [K,...] whose sum says nothing."""
        return (series for series in self.of(values) if series[0] != OTHER)
