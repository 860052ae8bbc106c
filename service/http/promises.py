"""Which mode a request is answered in: what it asks for, or what is usual for the server; and what
becomes of a promised recall while the traffic is not what the promise was calibrated on.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

from service.errors import DSSError, Kind
from service.repository.model import Model
from service.settings import AnswerSettings
from service.topk import SPARSE, Mode

Promise = Literal["kept", "withdrawn"]


class PromiseWithdrawn(DSSError):
    """The traffic has drifted, and the server refuses to promise a recall meanwhile."""

    kind = Kind.CONFLICT


def usual_mode(model: Model, settings: AnswerSettings) -> Mode:
    """Of requests that name neither experts nor a mode."""
    if settings.recall is None or model.engine.contract is None:
        return SPARSE
    return Mode(recall=settings.recall)


def promised(model: Model, mode: Mode, rows: int, settings: AnswerSettings) -> tuple[Mode, Promise]:
    """How rows with a promised recall are answered now, and whether the promise is kept."""
    assert mode.recall is not None  # noqa: S101
    contract = model.engine.contract
    if contract is None:
        return mode, "kept"  # the engine refuses it
    mode = Mode(recall=_calibrated(mode.recall, contract.levels))
    if mode.recall == 1.0 or not model.metrics.drift.shifted:  # a scan keeps any promise
        return mode, "kept"
    model.metrics.promises.withdrew(rows)
    if settings.on_drift == "report":
        return mode, "withdrawn"
    if settings.on_drift == "exact":
        return Mode(recall=1.0), "kept"
    raise PromiseWithdrawn(
        f"The traffic of {model.name}/{model.version} has drifted from the rows that its recall was"
        " calibrated on, so none is promised now; ask for exact answers, or for none in particular."
    )


def _calibrated(recall: float, levels: Sequence[float]) -> float:
    """The next level that was calibrated, which the engine would take anyway: so requests that ask
    for different promises can still be joined. Above all levels only a scan keeps it."""
    place = bisect_left(levels, recall)
    return levels[place] if place < len(levels) else 1.0
