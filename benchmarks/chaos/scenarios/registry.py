"""All scenarios, in the order in which they run."""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from benchmarks.chaos.harness.verdict import Context, Figures

COST_ATTACKS = ("decoding", "long_calls", "tls_readers", "pipelining", "labels", "metrics")
NAMES = (
    "fuzz",
    "schema",
    "attacks",
    "kill",
    "changed_bundles",
    "full_disk",
    "read_only_disk",
    "clock",
    "descriptors",
    "idle",
    "slow",
    "swaps",
    "overload",
    *COST_ATTACKS,
    "upgrade",
    "memory_at_load",
    "restart",
    "soak",
)


def title(name: str) -> str:
    words: str = _module(name).TITLE
    return words


def scenario(name: str) -> Callable[[Context], Figures]:
    function: Callable[[Context], Figures] = _module(name).run
    return function


def _module(name: str) -> ModuleType:
    package = "cost_attacks" if name in COST_ATTACKS else "scenarios"
    return import_module(f"benchmarks.chaos.{package}.{name}")
