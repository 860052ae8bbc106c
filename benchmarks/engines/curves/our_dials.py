"""This engine at every setting of its dials: experts searched, recall promised, exact.

B rows, k answers.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.engines.contestants import OURS, Contestant
from benchmarks.engines.timing import Rows
from service.bundle import Bundle
from service.engine import Engine
from service.errors import QueryError
from service.topk import SPARSE, Mode

Answer = Callable[[Rows], Any]


def our_dials(name: str, bundle: Bundle, ks: Sequence[int]) -> Iterator[Contestant]:
    """What the bundle cannot answer is left out, such as more answers than it holds."""
    engine = Engine(bundle, threads=1, backend="compiled")
    nothing = np.zeros((1, engine.hidden_size), np.float32)
    for k in ks:
        for method, dial, experts, mode in settings(engine):
            try:
                engine.check(nothing, k, experts, mode)
            except QueryError:
                continue
            answer = partial(engine.topk, k=k, experts=experts, mode=mode)
            yield _contestant(name, method, dial, answer, k)


def settings(engine: Engine) -> Iterator[tuple[str, dict[str, Any], int, Mode]]:
    """A method's name, what is shown of its dial, and how the engine is called."""
    powers = [2**power for power in range(engine.n_experts.bit_length())]
    for experts in powers:
        yield "experts", {"experts": experts}, experts, SPARSE
    if not engine.can_exact:
        return
    if engine.objective == "accuracy":
        for experts in powers:
            yield "rescored", {"rescored experts": experts}, experts, Mode(rescore=True)
    for level in [] if engine.contract is None else engine.contract.levels:
        yield "recall promised", {"recall": level}, 1, Mode(recall=level)
    yield "exact", {"exact": True}, 1, Mode(exact=True)


def _contestant(
    bundle: str, method: str, dial: dict[str, Any], answer: Answer, k: int
) -> Contestant:
    setting = " ".join(
        "exact" if key == "exact" else f"{key} {value}" for key, value in dial.items()
    )
    return Contestant(
        name=f"{bundle}, {setting}",
        method=f"{bundle}, {method}",
        kind=OURS,
        dial=dial,
        one=answer,
        many=answer,
        answers=lambda rows: answer(rows).classes,
        facts={"bundle": bundle},
        k=k,
    )
