"""Bundles in a comparison: answered by the engine that serves them.

B rows, D hidden, K experts, k answers.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from service import bundle as bundles
from service.bundle import Bundle
from service.bundle.manifest import RECALL_AT
from service.engine import Engine
from trainer.baselines.method import Baseline, Dial, Search
from trainer.data.arrays import ClassesDisagree, Head, WidthsDisagree

SEARCHED = (1, 2, 4)


@dataclass
class EngineSearch(Search):
    bundle: Bundle
    engine: Engine
    experts_searched: int

    nested = False  # a longer answer may need more experts, and rank otherwise

    def topk(self, hidden: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        return self.engine.topk(hidden, k, self.experts_searched).classes

    def counted(self, hidden: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], float]:
        answer = self.engine.topk(hidden, k, self.experts_searched)
        gate = self.engine.n_experts * len(hidden)
        inside = self.bundle.cost_of(answer.expert_rows, k)
        return answer.classes, float(gate + inside) * self.engine.hidden_size


class Served(Baseline):
    """One bundle; the dial is how many experts are searched."""

    method = "ds"

    def __init__(self, name: str, path: Path, head: Head) -> None:
        self._bundle = bundles.read(path)
        self._engine = engine = Engine(self._bundle)
        n_classes, hidden_size = head.weight.shape
        if engine.n_classes != n_classes:
            raise ClassesDisagree(
                f"{path} has {engine.n_classes} classes, but the head has {n_classes} of them."
            )
        if engine.hidden_size != hidden_size:
            raise WidthsDisagree(
                f"{path} takes vectors of {engine.hidden_size} numbers, but the head of"
                f" {hidden_size}."
            )
        engine.check(np.zeros((1, hidden_size), np.float32), RECALL_AT[-1])
        self.name = name

    def dials(self) -> list[Dial]:
        return [
            Dial({"experts_searched": searched}, self.name)
            for searched in SEARCHED
            if searched <= self._engine.n_experts
        ]

    def facts(self) -> dict[str, str]:
        return {"bundle": self._bundle.manifest.checksum}

    def build(self, dial: Dial) -> EngineSearch:
        return EngineSearch(self._bundle, self._engine, dial.settings["experts_searched"])
