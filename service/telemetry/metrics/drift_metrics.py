"""Gauges and counters about traffic that changes, and answers that get worse by it."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from service.bundle.manifest import RECALL_AT, TrainingFacts
from service.engine.kernels import call_counts
from service.shared_state.counters import Key, Values
from service.telemetry.metrics import shadow
from service.telemetry.metrics.drift import Trained, Window

MODEL = ("model", "version")
SHADOW = "shadow"


class Drift:
    """One model's traffic of the last minutes. `traffic` is what `Window` keeps:
    rows by first choice [K], rows by gate value [GATE_BINS], and the shadow's cells, if any."""

    def __init__(self, labels: tuple[str, str], facts: TrainingFacts, seconds: float) -> None:
        self.labels = labels
        self.trained = Trained(facts)
        self._seconds = seconds
        self._window: Window | None = None

    def is_due(self, now: float) -> bool:
        return self._window is None or self._window.is_due(now)

    def look(self, now: float, traffic: Values) -> None:
        if self._window is None:
            self._window = Window(self._seconds, now, traffic)
        else:
            self._window.look(now, traffic)

    def add_to(self, families: "Families", traffic: Values) -> None:
        if self._window is None:
            return
        recent = self._window.since(traffic)
        parts = np.cumsum([len(self.trained.experts), call_counts.GATE_BINS])
        chosen, gates, shadowed = np.split(recent, parts)
        families.rows.add_metric(self.labels, float(chosen.sum()))
        drift = self.trained.expert_drift(chosen)
        if drift is not None:
            families.experts.add_metric(self.labels, drift)
        drift = self.trained.gate_drift(gates)
        if drift is not None:
            families.gates.add_metric(self.labels, drift)
        if len(shadowed) and shadowed[shadow.ROWS]:
            for at, hits in _hits(shadowed):
                recall = hits / (shadowed[shadow.ROWS] * at)
                families.recall.add_metric((*self.labels, str(at)), float(recall))


class Families:
    def __init__(self) -> None:
        self.rows = GaugeMetricFamily(
            "dss_drift_window_rows", "Rows answered in the window of drift.", labels=MODEL
        )
        self.experts = GaugeMetricFamily(
            "dss_utilization_drift_ratio",
            "Stability index (PSI) of the experts' shares of recent rows, against training's.",
            labels=MODEL,
        )
        self.gates = GaugeMetricFamily(
            "dss_gate_drift_ratio",
            "Stability index (PSI) of recent rows' gate values, against training's.",
            labels=MODEL,
        )
        self.recall = GaugeMetricFamily(
            "dss_shadow_recall_ratio",
            "Of the full softmax's first classes, the share among ours; of recent sampled rows.",
            labels=(*MODEL, "at"),
        )

    def __iter__(self) -> Iterator[Metric]:
        yield from (self.rows, self.experts, self.gates, self.recall)


def drift_families(models: Iterable[tuple[Drift, Values]]) -> Iterator[Metric]:
    families = Families()
    for drift, traffic in models:
        drift.add_to(families, traffic)
    yield from families


def shadow_families(counted: Mapping[Key, Values]) -> Iterator[Metric]:
    rows = CounterMetricFamily(
        "dss_shadow_rows_total", "Rows rescanned with the full softmax.", labels=MODEL
    )
    dropped = CounterMetricFamily(
        "dss_shadow_dropped_rows_total",
        "Sampled rows that were not rescanned, because too many waited.",
        labels=MODEL,
    )
    hits = CounterMetricFamily(
        "dss_shadow_hits_total",
        "Classes of the full softmax's first ones that are among ours.",
        labels=(*MODEL, "at"),
    )
    for (what, *labels), cells in counted.items():
        if what == SHADOW:
            rows.add_metric(labels, float(cells[shadow.ROWS]))
            dropped.add_metric(labels, float(cells[shadow.DROPPED]))
            for at, found in _hits(cells):
                hits.add_metric([*labels, str(at)], float(found))
    yield from (rows, dropped, hits)


def _hits(cells: Values) -> Iterator[tuple[int, float]]:
    """For each number of first classes, as far as there are so many, how many agreed."""
    return zip(RECALL_AT, cells[shadow.HITS :].tolist(), strict=False)
