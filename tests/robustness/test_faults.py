"""Faults under load, each in its quick form; `make chaos` runs the long ones.

Overload, soak and the attacks beside ordinary traffic are left to it: beside other tests their
latencies would tell nothing.
"""

from pathlib import Path

import pytest

from benchmarks.chaos.harness.verdict import Context, NotPossible
from benchmarks.chaos.scenarios.registry import scenario


@pytest.mark.parametrize(
    "name",
    [
        "kill",
        "changed_bundles",
        "full_disk",
        "read_only_disk",
        "clock",
        "descriptors",
        "idle",
        "slow",
        "swaps",
        "upgrade",
        "memory_at_load",
        "restart",
    ],
)
def test_a_fault_under_load(name: str, tmp_path: Path) -> None:
    try:
        figures = scenario(name)(Context(tmp_path, quick=True))
    except NotPossible as error:
        pytest.skip(str(error))
    failed = [criterion for criterion in figures.criteria if not criterion.passed]
    assert figures.criteria and figures.answered
    assert not failed, figures.notes
