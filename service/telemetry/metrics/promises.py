"""How rows were answered, by experts or by a scan; under which promise, and what became of it.

Rows that were answered without a mode are counted by nobody but the total of all rows: what is not
said to be escalated or exact is sparse.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray
from prometheus_client.metrics_core import CounterMetricFamily, Metric

from service.engine.kernels import call_counts
from service.shared_state.counters import Counters, Key, Values
from service.telemetry.metrics import shadow
from service.telemetry.metrics.drift import MODEL
from service.topk import RUNGS, Mode

# What a block counts: the first part of its key.
CALLS, ANSWERED, WITHDRAWN, CONTRACT = "model", "answered", "withdrawn", "contract"
PROMISED = 0  # rows with a promised recall; then the rows of each rung, by its index, but the first
SPARSE_RUNG = 0


class PromiseMetrics:
    """One model's counters; a model without a head (`modes`) keeps none that others could see."""

    def __init__(
        self, counters: Counters, labels: tuple[str, str], *, modes: bool, checked: bool
    ) -> None:
        def block(what: str, size: int, shared: bool) -> Values:
            return counters.block((what, *labels), size) if shared else np.zeros(size)

        self.answered_key = (ANSWERED, *labels)
        self._answered = block(ANSWERED, len(RUNGS), modes)
        self._withdrawn = block(WITHDRAWN, 1, modes)
        self.contract = block(CONTRACT, shadow.CONTRACT_SIZE, modes and checked)

    def answered(self, mode: Mode, rungs: NDArray[np.uint8]) -> None:
        """An engine call answered rows [B] so; one call at a time."""
        rows = np.bincount(rungs, minlength=len(RUNGS))
        self._answered[1:] += rows[1:]
        if mode.recall is not None:
            self._answered[PROMISED] += len(rungs)

    def withdrew(self, rows: int) -> None:
        """Rows came with a promise that drift withdraws. Called on the event loop alone."""
        self._withdrawn[0] += rows

    def scanned(self, counted: Mapping[Key, Values]) -> float:
        """Rows for which all classes were scored."""
        return float(counted.get(self.answered_key, self._answered)[1:].sum())


def promise_families(counted: Mapping[Key, Values]) -> Iterator[Metric]:
    def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(name, text, labels=(*MODEL, *labels))

    answered = counter("dss_answered_rows_total", "Rows by how they were answered.", "rung")
    promised = counter("dss_contract_rows_total", "Rows answered with a promised recall.")
    withdrawn = counter(
        "dss_contract_withdrawn_rows_total",
        "Rows that came with a promised recall while drift withdraws it.",
    )
    checked_rows = counter(
        "dss_contract_checked_rows_total", "Rows with a promised recall, rescanned by the shadow."
    )
    checked = counter(
        "dss_contract_checked_total", "Classes of the head's k best that were looked for in those."
    )
    missed = counter("dss_contract_misses_total", "Classes among these that were not answered.")
    allowed = counter(
        "dss_contract_allowed_misses_total", "Misses that the promises of those rows allow."
    )
    for (what, *labels), counters in counted.items():
        if what == CALLS:
            scanned = counted.get((ANSWERED, *labels), np.zeros(len(RUNGS)))[1:]
            sparse = float(counters[call_counts.ROWS] - scanned.sum())
            answered.add_metric([*labels, RUNGS[SPARSE_RUNG]], max(0.0, sparse))
        elif what == ANSWERED:
            promised.add_metric(labels, float(counters[PROMISED]))
            for rung, rows in zip(RUNGS[1:], counters[1:].tolist(), strict=True):
                answered.add_metric([*labels, rung], rows)
        elif what == WITHDRAWN:
            withdrawn.add_metric(labels, float(counters[0]))
        elif what == CONTRACT:
            checked_rows.add_metric(labels, float(counters[shadow.CONTRACT_ROWS]))
            checked.add_metric(labels, float(counters[shadow.CHECKED]))
            missed.add_metric(labels, float(counters[shadow.MISSED]))
            allowed.add_metric(labels, float(counters[shadow.ALLOWED]))
    yield from (answered, promised, withdrawn, checked_rows, checked, missed, allowed)
