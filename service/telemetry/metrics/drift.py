"""How far the traffic of the last minutes is from the rows that training measured, and the metrics
that show it: drift of the experts' shares and of gate values, and recall against the full softmax.

Distance is the population stability index of two sets of shares p and q: the sum of
(p - q) ln(p / q) over all bins. It is 0 for equal shares; below 0.1 is commonly called no shift,
above 0.25 a large one.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from service.bundle.manifest import RECALL_AT, TrainingFacts
from service.engine.kernels.call_counts import GATE_BINS
from service.shared_state.counters import Key, Values
from service.telemetry.metrics import shadow

MODEL = ("model", "version")  # labels
SHADOW = "shadow"  # what a block counts: the first part of its key

STEP_SECONDS = 10.0  # between samples of the counts: by so much a window may be too long
LEAST_ROWS, LEAST_ROWS_OF_A_BIN = 1000, 20  # fewer are more noise than shift
LARGE_SHIFT = 0.25  # from here on the alerts fire, and a promised recall is withdrawn
UNSEEN = 0.5  # rows added to every bin, live and trained: an empty one would be infinitely far


def stability_index(counts: Values, shares: Values) -> float | None:
    """Of rows counted in bins; None if they are too few to tell."""
    total = float(counts.sum())
    if total < max(LEAST_ROWS, LEAST_ROWS_OF_A_BIN * len(counts)):
        return None
    live = counts + UNSEEN
    trained = shares / shares.sum() * total + UNSEEN
    live, trained = live / live.sum(), trained / trained.sum()
    return float(((live - trained) * np.log(live / trained)).sum())


def effective_number(counts: Values) -> float:
    """How many bins the counts are spread over: exp of the entropy of their shares. K bins with
    equal shares count K, one that has everything counts 1."""
    shares = counts[counts > 0] / counts.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


class Window:
    """What was counted in the last so many seconds, of counts that only grow."""

    def __init__(self, seconds: float, now: float, counts: Values) -> None:
        self._seconds = seconds
        self._samples = deque([(now, counts)])

    def is_due(self, now: float) -> bool:
        """Whether it is time for another sample."""
        return now - self._samples[-1][0] >= min(STEP_SECONDS, self._seconds)

    def look(self, now: float, counts: Values) -> None:
        self._samples.append((now, counts))
        while len(self._samples) > 1 and now - self._samples[1][0] >= self._seconds:
            self._samples.popleft()

    def since(self, counts: Values) -> Values:
        return np.maximum(counts - self._samples[0][1], 0.0)


class Trained:
    """What training measured, as shares of rows."""

    def __init__(self, facts: TrainingFacts) -> None:
        self.experts = np.array(facts.utilization)  # [K]
        self.edges = np.full(GATE_BINS - 1, np.inf, np.float32)
        self.gates: Values | None = None
        if facts.gates is not None:
            self.edges[: len(facts.gates.edges)] = facts.gates.edges
            self.gates = np.array(facts.gates.shares)

    def expert_drift(self, counts: Values) -> float | None:
        """Of rows by the expert that the gate chose first [K]."""
        return stability_index(counts, self.experts) if self.experts.any() else None

    def gate_drift(self, counts: Values) -> float | None:
        """Of rows by how sure the gate was [GATE_BINS]."""
        if self.gates is None or not self.gates.any():
            return None
        return stability_index(counts[: len(self.gates)], self.gates)


class Drift:
    """One model's traffic of the last minutes. `traffic` is what `Window` keeps:
    rows by first choice [K], rows by gate value [GATE_BINS], and the shadow's counters, if any."""

    def __init__(self, labels: tuple[str, str], facts: TrainingFacts, seconds: float) -> None:
        self.labels = labels
        self.trained = Trained(facts)
        self.shifted = False  # by more than LARGE_SHIFT, when it was last looked at
        self._seconds = seconds
        self._window: Window | None = None

    def is_due(self, now: float) -> bool:
        return self._window is None or self._window.is_due(now)

    def look(self, now: float, traffic: Values) -> None:
        if self._window is None:
            self._window = Window(self._seconds, now, traffic)
        else:
            self._window.look(now, traffic)
        drifts = self._drifts(self._window.since(traffic))
        self.shifted = any(drift is not None and drift > LARGE_SHIFT for drift in drifts)

    def _drifts(self, recent: Values) -> tuple[float | None, float | None]:
        """Of experts and of gates; None where rows are too few to tell."""
        chosen, gates, _ = self._split(recent)
        return self.trained.expert_drift(chosen), self.trained.gate_drift(gates)

    def _split(self, recent: Values) -> list[Values]:
        return np.split(recent, np.cumsum([len(self.trained.experts), GATE_BINS]))

    def add_to(self, families: "DriftFamilies", traffic: Values) -> None:
        if self._window is None:
            return
        recent = self._window.since(traffic)
        chosen, _, shadowed = self._split(recent)
        families.rows.add_metric(self.labels, float(chosen.sum()))
        if chosen.any():
            families.effective_experts.add_metric(self.labels, effective_number(chosen))
        for family, drift in zip(
            (families.experts, families.gates), self._drifts(recent), strict=True
        ):
            if drift is not None:
                family.add_metric(self.labels, drift)
        if len(shadowed) and shadowed[shadow.ROWS]:
            for at, hits in _hits(shadowed):
                recall = hits / (shadowed[shadow.ROWS] * at)
                families.recall.add_metric((*self.labels, str(at)), float(recall))


class DriftFamilies:
    def __init__(self) -> None:
        self.rows = GaugeMetricFamily(
            "dss_drift_window_rows", "Rows answered in the window of drift.", labels=MODEL
        )
        self.effective_experts = GaugeMetricFamily(
            "dss_effective_experts",
            "How many experts recent rows were spread over: exp of the entropy of their shares.",
            labels=MODEL,
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
        yield from (self.rows, self.effective_experts, self.experts, self.gates, self.recall)


def drift_families(models: Iterable[tuple[Drift, Values]]) -> Iterator[Metric]:
    families = DriftFamilies()
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
    for (what, *labels), counters in counted.items():
        if what == SHADOW:
            rows.add_metric(labels, float(counters[shadow.ROWS]))
            dropped.add_metric(labels, float(counters[shadow.DROPPED]))
            for at, found in _hits(counters):
                hits.add_metric([*labels, str(at)], float(found))
    yield from (rows, dropped, hits)


def _hits(counters: Values) -> Iterator[tuple[int, float]]:
    """For each number of first classes, as far as there are so many, how many agreed."""
    return zip(RECALL_AT, counters[shadow.HITS :].tolist(), strict=False)
