"""The ways to learn a layer from hidden vectors, by name.

`start` makes the layer that training begins with and refuses a budget that cannot be met; it writes
nothing. `learn` trains that layer, in a folder in which it can be resumed.
"""

from pathlib import Path
from typing import NamedTuple, Protocol

from trainer.layer import DSSoftmax
from trainer.training import dense, mitosis, warm_start
from trainer.training.config import VectorsConfig
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


class Method(NamedTuple):
    start: Start
    learn: Learn


METHODS = {
    "warm": Method(warm_start.start, warm_start.learn),
    "mitosis": Method(mitosis.start, mitosis.learn),
    "dense": Method(dense.start, dense.learn),
}
