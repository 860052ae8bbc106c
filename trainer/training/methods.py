"""The ways to learn a layer from hidden vectors, by name.

`start` makes the layer that training begins with and refuses a budget that cannot be met; it writes
nothing. `learn` trains that layer, in a folder in which it can be resumed.

A layer for fidelity has a method of its own, "fidelity".
"""

from pathlib import Path
from typing import NamedTuple, Protocol

from trainer.layer import DSSoftmax
from trainer.training import dense, mitosis, warm_start
from trainer.training.config import VectorsConfig
from trainer.training.fidelity import method as fidelity
from trainer.training.loop import Data
from trainer.training.problem import Learned, Problem


class Start(Protocol):
    def __call__(self, config: VectorsConfig, problem: Problem) -> DSSoftmax: ...


class Learn(Protocol):
    def __call__(
        self,
        config: VectorsConfig,
        problem: Problem,
        layer: DSSoftmax,
        data: Data,
        folder: Path,
        *,
        resume: bool,
    ) -> Learned: ...


class Allowance(Protocol):
    def __call__(
        self, config: VectorsConfig, problem: Problem, layer: DSSoftmax
    ) -> float | None: ...


class Method(NamedTuple):
    start: Start
    learn: Learn
    within_budget: bool  # from the start on: then the start's figures say what can be reached
    allowance: Allowance | None = None  # classes per answer with which enough can be reached


METHODS = {
    "warm": Method(
        warm_start.start,
        warm_start.learn,
        within_budget=True,
        allowance=warm_start.allowance,
    ),
    "mitosis": Method(mitosis.start, mitosis.learn, within_budget=False),
    "dense": Method(dense.start, dense.learn, within_budget=False),
    "fidelity": Method(
        fidelity.start, fidelity.learn, within_budget=True, allowance=fidelity.allowance
    ),
}


def method_of(config: VectorsConfig) -> Method:
    return METHODS[config.method if config.objective == "accuracy" else config.objective]
