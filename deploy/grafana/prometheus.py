"""What a panel asks, put to a real Prometheus with Grafana's variables filled in."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import numpy as np
from numpy.typing import NDArray

Json = dict[str, Any]


@dataclass(frozen=True)
class Series:
    labels: Mapping[str, str]
    values: NDArray[np.float64]  # [T], one for each moment asked about; NaN where there is none

    @property
    def last(self) -> float:
        known = self.values[~np.isnan(self.values)]
        return float(known[-1]) if len(known) else float("nan")

    def name(self, template: str) -> str:
        """A legend: {{label}} stands for a label's value."""
        return re.sub(r"{{(\w+)}}", lambda found: self.labels.get(found[1], ""), template)


class Asking(Protocol):
    @property
    def times(self) -> NDArray[np.float64]:
        """The moments [T] asked about, in seconds since the epoch."""

    def over_time(self, query: str) -> list[Series]: ...

    def at_end(self, query: str) -> list[Series]:
        """At the last moment alone: T is 1."""


@dataclass(frozen=True)
class Prometheus:
    url: str
    start: float
    end: float
    step: float
    variables: Mapping[str, str]  # of the dashboard, with their dollars

    @property
    def times(self) -> NDArray[np.float64]:
        return np.arange(self.start, self.end + self.step / 2, self.step)

    def over_time(self, query: str) -> list[Series]:
        times = self.times
        found = self._ask(
            "query_range", query, start=str(times[0]), end=str(times[-1]), step=str(self.step)
        )
        return [
            Series(series["metric"], self._on_grid(series["values"])) for series in found["result"]
        ]

    def at_end(self, query: str) -> list[Series]:
        found = self._ask("query", query, time=str(self.times[-1]))
        return [
            Series(series["metric"], np.array([float(series["value"][1])]))
            for series in found["result"]
        ]

    def _on_grid(self, points: list[tuple[float, str]]) -> NDArray[np.float64]:
        values = np.full(len(self.times), np.nan)
        for moment, value in points:
            values[round((moment - self.start) / self.step)] = float(value)
        return values

    def _ask(self, path: str, query: str, **parameters: str) -> Json:
        for name, value in self.variables.items():
            query = query.replace(name, value)
        answer = httpx.get(
            f"{self.url}/api/v1/{path}", params={"query": query, **parameters}, timeout=60
        )
        answer.raise_for_status()
        data: Json = answer.json()["data"]
        return data
