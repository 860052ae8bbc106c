"""Rows that are put aside: whole blocks, spread over the file, apart from what is learned from."""

import numpy as np
import pytest

from trainer.data import held_out
from trainer.data.held_out import HeldOutRows, TooFewRows, in_halves, put_aside


def runs(numbers: np.ndarray) -> list[np.ndarray]:
    """Ascending numbers in stretches without a gap."""
    return np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)


def everything(aside: HeldOutRows) -> np.ndarray:
    return np.sort(np.concatenate([aside.choice, aside.report]))


@pytest.mark.parametrize("n_rows", [320, 1_000, 5_000, 20_481, 300_000, 1_000_003])
def test_no_row_is_near_one_that_is_learned_from(n_rows: int) -> None:
    learned, aside = put_aside(n_rows)
    held = everything(aside)
    assert len(np.unique(held)) == len(held) and held[0] >= 0 and held[-1] < n_rows
    blocks = runs(held)
    assert len(blocks) in (16, 32)
    guard = min(8, len(blocks[0]) // 2)
    assert guard >= 1
    near = np.unique(np.clip(held[:, None] + np.arange(-guard, guard + 1), 0, n_rows - 1))
    assert np.array_equal(learned, np.setdiff1d(np.arange(n_rows), near))


@pytest.mark.parametrize("n_rows", [320, 5_000, 300_000, 1_000_003])
def test_how_many_are_put_aside(n_rows: int) -> None:
    learned, aside = put_aside(n_rows)
    held = len(everything(aside))
    assert held <= 20_000
    assert held == pytest.approx(min(20_000, max(64, n_rows / 20)), rel=0.1)
    assert len(aside.choice) == len(aside.report)
    assert len(learned) > 0.55 * n_rows


def test_blocks_are_spread_evenly_and_take_turns() -> None:
    _, aside = put_aside(100_000)
    starts = np.array([block[0] for block in runs(everything(aside))])
    assert np.ptp(np.diff(starts)) <= 1
    assert starts[0] < 100_000 / 32 and starts[-1] > 100_000 * 31 / 32
    assert np.array_equal(starts[::2], [block[0] for block in runs(aside.choice)])
    assert np.array_equal(starts[1::2], [block[0] for block in runs(aside.report)])


def test_too_few_rows_are_refused_with_how_many_it_takes() -> None:
    with pytest.raises(TooFewRows, match=r"There are 319 rows.*at least 320.*--valid-hidden"):
        put_aside(319)
    with pytest.raises(TooFewRows, match="There are 15 validation rows: give at least 16"):
        in_halves(15)


@pytest.mark.parametrize("n_rows", [16, 100, 500, 40_000, 73_760])
def test_a_users_own_rows_are_divided_in_blocks_too(n_rows: int) -> None:
    aside = in_halves(n_rows)
    assert len(aside.choice) == len(aside.report)
    held = everything(aside)
    assert len(np.unique(held)) == len(held) and held[-1] < n_rows
    assert min(n_rows, 40_000) - 32 < len(held) <= held_out.MOST_GIVEN


def test_what_a_trained_layer_may_be_measured_on() -> None:
    aside = in_halves(500)
    assert np.array_equal(
        held_out.unseen(500, given=True), np.setdiff1d(np.arange(500), aside.choice)
    )
    assert np.array_equal(held_out.unseen(1000, given=False), put_aside(1000)[1].report)
    assert len(held_out.unseen(200, given=False)) == 200  # nothing was trained with so few
    assert len(held_out.unseen(9, given=True)) == 9
