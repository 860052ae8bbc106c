"""All scenarios, in the order in which they run."""

from collections.abc import Callable
from importlib import import_module

from benchmarks.chaos.harness.verdict import Context, Figures

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
    "soak",
)


def title(name: str) -> str:
    words: str = import_module(f"benchmarks.chaos.scenarios.{name}").TITLE
    return words


def scenario(name: str) -> Callable[[Context], Figures]:
    function: Callable[[Context], Figures] = import_module(f"benchmarks.chaos.scenarios.{name}").run
    return function
