"""Figures in plain words."""

from typing import Any

import pytest

from trainer.training.verdict import balance_warning, speedup, verdict


def summary(precision: float, **more: object) -> dict[str, Any]:
    return {
        "precision": {"1": precision, "5": 0.9, "10": 0.9},
        "objective": "accuracy",
        "flops_speedup": 20.4,
        "reachable": {"1": 0.995, "10": 0.98},
        **more,
    }


def test_what_is_kept() -> None:
    assert verdict(summary(0.9914)) == "It keeps the model's first answer on 99.1% of rows."


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"reachable": {"1": 0.8}, "speedup_for_99": 12.7}, "allow 12x or bring more rows"),
        ({"reachable": {"1": 0.8}}, "allow a smaller speedup or bring more rows"),
        ({}, "--objective fidelity keeps more of them"),
        ({"objective": "fidelity"}, ": bring more rows."),
    ],
)
def test_what_is_lost_and_what_to_do(more: dict[str, Any], words: str) -> None:
    said = verdict(summary(0.77, **more))
    assert said.startswith("It loses 23.0 points of the model's first answers: ")
    assert words in said and said.endswith(".") and said.count(".") <= 3


def test_a_speedup_is_rounded_down() -> None:
    assert [speedup(times) for times in (12.9, 9.99, 1.04)] == ["12x", "9.9x", "1.0x"]


def crowded(classes: int, share: float, used: float, **more: object) -> dict[str, Any]:
    return {
        "largest_expert": {"expert": 3, "classes": classes, "share": share, "utilization": used},
        "utilization": [1 / 16] * 16,
        "mean_rows": 600.0,
        "keep_one": True,
        **more,
    }


def test_one_expert_may_not_hold_much_of_all_unnoticed() -> None:
    assert balance_warning(crowded(900, 0.03, 0.06)) is None
    busy = balance_warning(crowded(2_800, 0.28, 0.2))
    assert busy is not None
    assert busy.startswith("Expert 3 holds 2,800 classes, 28% of all, and is chosen for 20.0%")
    assert "--experts 32" in busy
    idle = balance_warning(crowded(15_419, 0.48, 0.001))
    assert idle is not None and "--no-keep-one" in idle
    large = balance_warning(crowded(3_001, 0.1, 0.1))
    assert large is not None and "3,001" in large
    assert balance_warning(crowded(3_000, 0.1, 0.1)) is None


def test_few_experts_hold_a_large_part_each() -> None:
    few = {"utilization": [0.25] * 4, "mean_rows": 400.0}
    assert balance_warning(crowded(450, 0.45, 0.25, **few)) is None
    assert balance_warning(crowded(510, 0.51, 0.25, **few)) is not None
