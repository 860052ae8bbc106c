"""What a bundle says of a model. The same in every worker, so each shows its own."""

from collections.abc import Iterator, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, Gauge

from service.bundle import Bundle
from service.telemetry.metrics.drift import MODEL, effective_number
from service.telemetry.metrics.expert_series import ExpertSeries

EXPERT = (*MODEL, "expert")

Series = tuple[Gauge, tuple[str, ...]]  # a gauge and the values of its labels


class ModelGauges:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: Sequence[str]) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        self._expert_classes = gauge("dss_expert_classes", "Classes held by an expert.", EXPERT)
        self._expert_cost = gauge(
            "dss_expert_cost_rows",
            "What a row costs an expert, in classes scored: less than it holds if approximated.",
            EXPERT,
        )
        self._trained_utilization = gauge(
            "dss_trained_expert_utilization_ratio",
            "Share of the training run's test rows that chose an expert.",
            EXPERT,
        )
        self._classes = gauge("dss_model_classes", "Classes of a model.", MODEL)
        self._experts = gauge("dss_model_experts", "Experts of a model.", MODEL)
        self._effective_experts = gauge(
            "dss_trained_effective_experts",
            "How many experts training's rows were spread over: exp of the entropy of their shares",
            MODEL,
        )
        self._trained_speedup = gauge(
            "dss_trained_flops_speedup_ratio", "FLOPs speedup measured in training.", MODEL
        )
        self._trained_recall = gauge(
            "dss_trained_recall_ratio",
            "Of the full softmax's first classes, the share among ours, as measured at export.",
            (*MODEL, "at"),
        )
        self._info = gauge(
            "dss_model_info",
            "1 for each model that is loaded.",
            (*MODEL, "n_classes", "hidden_size", "n_experts", "format_version", "created"),
        )

    def show(self, labels: tuple[str, str], bundle: Bundle, experts: ExpertSeries) -> set[Series]:
        """Set the gauges of a model; what it shows is returned."""
        values = dict(self._values(labels, bundle, experts))
        for (gauge, its_labels), value in values.items():
            gauge.labels(*its_labels).set(value)
        return {*values}

    def _values(
        self, labels: tuple[str, str], bundle: Bundle, experts: ExpertSeries
    ) -> Iterator[tuple[Series, float]]:
        manifest, training = bundle.manifest, bundle.manifest.training
        utilization = np.asarray(training.utilization, np.float64)
        for gauge, series in (
            (self._expert_classes, experts.of(np.asarray(manifest.expert_sizes, np.float64))),
            (self._expert_cost, experts.own(np.asarray(bundle.expert_costs, np.float64))),
            (self._trained_utilization, experts.of(utilization)),
        ):
            for expert, value in series:
                yield (gauge, (*labels, expert)), float(value)
        yield (self._classes, labels), manifest.n_classes
        yield (self._experts, labels), manifest.n_experts
        if utilization.any():
            yield (self._effective_experts, labels), effective_number(utilization)
        yield (self._trained_speedup, labels), training.flops_speedup
        for at, recall in (training.head_recall or {}).items():
            yield (self._trained_recall, (*labels, at)), recall
        facts = (
            manifest.n_classes,
            manifest.hidden_size,
            manifest.n_experts,
            manifest.format_version,
            manifest.created,
        )
        yield (self._info, (*labels, *map(str, facts))), 1
