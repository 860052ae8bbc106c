"""What the pictures of a report show."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.report import layer_figures, trade_off
from trainer.report import runs as report_data

costs = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


@given(costs, st.booleans())
def test_the_frontier_is_what_nothing_beats(pairs: list[tuple[int, int]], more: bool) -> None:
    points = [trade_off.Measured("svd", c, {"1": a / 10}) for c, a in pairs]

    def beats(one: trade_off.Measured, other: trade_off.Measured) -> bool:
        cheaper = one.cost >= other.cost if more else one.cost <= other.cost
        return cheaper and one.accuracy["1"] >= other.accuracy["1"] and one != other

    kept = trade_off.frontier(points, "1", more_is_better=more)
    assert {(p.cost, p.accuracy["1"]) for p in kept} == {
        (p.cost, p.accuracy["1"]) for p in points if not any(beats(q, p) for q in points)
    }
    assert [p.cost for p in kept] == sorted(p.cost for p in kept)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 64)), min_size=1, max_size=50))
def test_redundancy_counts_each_word_that_can_be_shown(pairs: list[tuple[int, int]]) -> None:
    frequencies, copies = np.array(pairs, np.int64).T
    counted = layer_figures.redundancy(frequencies, copies)
    shown = (frequencies > 0) & (copies > 0)
    assert counted.words.sum() == shown.sum()
    total = np.nansum(counted.mean_copies * counted.words.sum(1))
    assert total == pytest.approx(copies[shown].sum())


def test_a_large_vocabulary_is_drawn_in_columns() -> None:
    rng = np.random.default_rng(0)
    layer = report_data.LayerFacts(
        "large",
        rng.random((64, 33_278)) < 0.02,
        np.full(64, 1 / 64),
        rng.integers(1, 1000, 33_278),
        None,
    )
    assert layer_figures.expert_matrix(layer).startswith(b"\x89PNG")
