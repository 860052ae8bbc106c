"""Screening without learning: clusters of hidden vectors, each with the classes seen in it.

As the warm start of the doubly sparse layer, with the head's own rows; answered by the same engine.

K experts, N classes, M sampled rows, D hidden.
"""

import shutil
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from service import bundle
from service.engine import Engine
from trainer.baselines.bundle import EngineSearch
from trainer.baselines.method import Baseline, Dial, Inputs
from trainer.training import warm_start
from trainer.training.answer_gains import head_gains
from trainer.training.warm_start import Demand

CLUSTERS = (64, 128, 256)
ROWS = (25, 50, 75, 100, 150, 200, 300, 500)  # budgets: classes scored per answer, on average


@dataclass(frozen=True)
class Clusters:
    gate: Tensor  # [K,D]
    wanted: Demand
    seconds: float


class Screening(Baseline):
    """The dial is the number of clusters and the budget of classes."""

    method = "screening"

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self._clusters = cache(self._find_clusters)

    def dials(self) -> list[Dial]:
        return [
            Dial({"clusters": clusters, "rows": rows}, f"screening K={clusters}, {rows} rows")
            for clusters in CLUSTERS
            for rows in ROWS
            if clusters < len(self.inputs.training.labels) and rows < self.inputs.n_classes
        ]

    def facts(self) -> dict[str, Any]:
        return {"seed": self.inputs.options.seed}

    def _find_clusters(self, clusters: int) -> Clusters:
        started = time.perf_counter()
        hidden, labels = self.inputs.sample()
        gate = warm_start.cluster_gate(hidden, clusters, self.inputs.options.seed)
        head = torch.from_numpy(self.inputs.head.weight)
        gains = head_gains(head, hidden)
        wanted = warm_start.demand(gate, hidden, gains, hidden, labels)  # the sample's are enough
        return Clusters(gate, wanted, time.perf_counter() - started)

    def build(self, dial: Dial) -> EngineSearch:
        found = self._clusters(dial.settings["clusters"])
        started = time.perf_counter()
        held = warm_start.select(found.wanted, dial.settings["rows"], keep_one=False)  # [K,N]
        expert, classes = (index.numpy() for index in held.nonzero(as_tuple=True))
        sizes = np.bincount(expert, minlength=len(held))
        utilization = found.wanted.utilization.tolist()
        folder = self.inputs.folder(self.method, {**dial.settings, **self.facts()})
        shutil.rmtree(folder, ignore_errors=True)
        written = bundle.write(
            folder,
            gate=found.gate.numpy(),
            weight=self.inputs.head.weight[classes],
            offsets=np.concatenate([[0], np.cumsum(sizes)]),
            classes=classes.astype(np.int32),
            n_classes=self.inputs.n_classes,
            training=bundle.TrainingFacts(
                utilization=utilization,
                flops_speedup=bundle.flops_speedup(
                    self.inputs.n_classes, sizes.tolist(), utilization
                ),
            ),
        )
        shutil.rmtree(folder)
        engine = Engine(written)
        seconds = found.seconds + time.perf_counter() - started
        return EngineSearch(written, engine, 1, build_seconds=seconds)
