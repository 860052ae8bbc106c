"""What is counted of one loaded model."""

from collections.abc import Callable, Mapping, Sequence
from time import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.bundle import Bundle
from service.engine.kernels import call_counts
from service.shared_state.counters import Counters, Key, Values, totals
from service.telemetry.metrics.drift import SHADOW, Drift
from service.telemetry.metrics.expert_series import ExpertSeries
from service.telemetry.metrics.model_gauges import ModelGauges
from service.telemetry.metrics.promises import ANSWERED, CONTRACT, WITHDRAWN, PromiseMetrics
from service.topk import Mode, TopK

# What a block counts: the first part of its key.
MODEL_CALLS, QUEUE_ROWS, FAILED = "model", "queue", "failed"
OF_A_MODEL = (MODEL_CALLS, QUEUE_ROWS, FAILED, SHADOW, ANSWERED, WITHDRAWN, CONTRACT)

Counted = Mapping[Key, Values]  # the sums over all workers


class Statistics(NamedTuple):
    """What became of a model's requests, in all workers together."""

    last: float  # when an engine call ended last, in seconds since the epoch; 0 before any
    requests: int  # that were answered
    rows: int
    executions: int
    queue_seconds: float
    request_seconds: float  # in the engine, as each request saw it
    failures: int
    failure_seconds: float


class ModelMetrics:
    """One model's counters. Their labels are looked up once, since every call counts here."""

    def __init__(
        self,
        gauges: ModelGauges,
        counters: Counters,
        name: str,
        version: str,
        bundle: Bundle,
        window_seconds: float,
        shadow_size: int,
        own_series: int | None,
        modes: bool,
    ) -> None:
        manifest = bundle.manifest
        n_experts = manifest.n_experts
        self.labels = (name, version)
        self.n_classes = manifest.n_classes
        self.expert_costs = bundle.expert_costs
        self._counters = counters
        self._key = (MODEL_CALLS, *self.labels)
        self._calls = counters.block(self._key, call_counts.size(n_experts))
        self._queue = counters.block((QUEUE_ROWS, *self.labels), 1)
        self._failed_key = (FAILED, *self.labels)
        self._failed = counters.block(self._failed_key, 2)  # requests and their seconds
        self._queue_rows: Callable[[], float] = lambda: 0
        self._shadow_key = (SHADOW, *self.labels)
        self.shadow = counters.block(self._shadow_key, shadow_size) if shadow_size else np.empty(0)
        self.promises = PromiseMetrics(
            counters, self.labels, modes=modes, checked=bool(shadow_size)
        )
        self.drift = Drift(self.labels, manifest.training, window_seconds)
        self.experts = ExpertSeries(manifest.training.utilization, own_series)
        self.series = gauges.show(self.labels, bundle, self.experts)
        self._add_call = call_counts.compiled_add_call()
        self._waits = np.zeros(1)

    def watch_queue(self, rows: Callable[[], float]) -> None:
        """The queue is asked for its length when scraped."""
        self._queue_rows = rows

    def publish_queue(self) -> None:
        self._queue[0] = self._queue_rows()

    def executed(self, waits: Sequence[float], rows: int, seconds: float, result: TopK) -> None:
        """An engine call answered len(waits) requests, which had waited that many seconds.

        One call at a time: the counters have no lock.
        """
        requests = len(waits)
        if requests > len(self._waits):
            self._waits = np.zeros(2 * requests)
        if requests == 1:
            self._waits[0] = waits[0]
        else:
            self._waits[:requests] = waits
        self._add_call(
            self._calls,
            self._waits,
            requests,
            rows,
            time(),
            seconds,
            result.gate_seconds,
            result.expert_rows,
            result.expert_seconds,
            result.experts,
            result.gates,
            self.drift.trained.edges,
        )

    def answered(self, mode: Mode, rungs: NDArray[np.uint8]) -> None:
        """The same call, if a mode was asked for: how each of its rows was answered."""
        self.promises.answered(mode, rungs)

    def failed(self, seconds: float) -> None:
        """A request for this version was not answered. Called on the event loop alone."""
        self._failed[0] += 1
        self._failed[1] += seconds

    @property
    def statistics(self) -> Statistics:
        """Over all workers."""
        calls = self._totals()
        failed = totals(self._counters.blocks(self._failed_key)).get(self._failed_key, self._failed)
        return Statistics(
            last=max(
                float(calls[call_counts.LAST]) for _, _, calls in self._counters.blocks(self._key)
            ),
            requests=int(calls[call_counts.REQUESTS]),
            rows=int(calls[call_counts.ROWS]),
            executions=int(calls[call_counts.EXECUTIONS]),
            queue_seconds=float(calls[call_counts.QUEUE]),
            request_seconds=float(calls[call_counts.REQUEST_SECONDS]),
            failures=int(failed[0]),
            failure_seconds=float(failed[1]),
        )

    def read(self) -> Counted:
        """What was counted of this version; a scrape reads everything at once instead."""
        keys = [self._key, self.promises.answered_key]
        keys += [self._shadow_key] if len(self.shadow) else []
        return totals(block for key in keys for block in self._counters.blocks(key))

    def _totals(self, counted: Counted | None = None) -> Values:
        return (self.read() if counted is None else counted).get(self._key, self._calls)

    @property
    def expert_rows(self) -> list[int]:
        return [int(rows) for rows in experts_of(self._totals())[:, call_counts.SCORED]]

    @property
    def expert_mean_seconds(self) -> list[float | None]:
        """Of one execution, whatever its number of rows; None for an expert never run."""
        experts = experts_of(self._totals())
        took = experts[:, call_counts.TOOK]
        runs = experts[:, call_counts.TOOK + 1 :].sum(axis=1)
        return [float(s / n) if n else None for s, n in zip(took, runs, strict=True)]

    def traffic(self, counted: Counted) -> Values:
        """What `Drift` compares: counts that only grow."""
        calls = self._totals(counted)
        chosen = experts_of(calls)[: len(self.expert_costs), call_counts.CHOSEN]
        gates = calls[call_counts.CONFIDENCE : call_counts.CONFIDENCE + call_counts.GATE_BINS]
        shadow = counted.get(self._shadow_key, self.shadow) if len(self.shadow) else self.shadow
        return np.concatenate([chosen, gates, shadow])

    def scored_classes(self, counted: Counted) -> float:
        """Rows scored by each expert times what one costs it, together, and all classes of the
        rows that were scanned."""
        rows = experts_of(self._totals(counted))[: len(self.expert_costs), call_counts.SCORED]
        searched = float(rows @ np.asarray(self.expert_costs, np.float64))
        return searched + self.n_classes * self.promises.scanned(counted)

    def utilization(self, counted: Counted | None = None) -> Values | None:
        """u_k: rows scored by each expert per row answered; None before the first row.

        They sum to 1 when each row needs one expert, and to more when rows search several.
        """
        calls = self._totals(counted)
        if not calls[call_counts.ROWS]:
            return None
        shares: Values = experts_of(calls)[:, call_counts.SCORED] / calls[call_counts.ROWS]
        return shares

    def flops_speedup(self, counted: Counted | None = None) -> float | None:
        """The paper's |V| / (sum_k |v_k| u_k + K), of the rows answered so far; None before any."""
        counted = self.read() if counted is None else counted
        rows = float(self._totals(counted)[call_counts.ROWS])
        if not rows:
            return None
        return self.n_classes / (self.scored_classes(counted) / rows + len(self.expert_costs))


def experts_of(calls: Values) -> Values:
    """A row of counters for each expert of a model's block."""
    return calls[call_counts.EXPERTS :].reshape(-1, call_counts.EXPERT)
