"""Rows that are put aside before anything is learned, so that figures come from rows nobody saw.

Neighbouring rows are alike: they are words of one sentence, or crops of one page. Rows that are put
aside one by one have their like among the training rows, so whole blocks are put aside, and a few
rows on either side of each are not used at all.

Of two blocks one is for choices (when to stop, which layer to keep) and one for the figures that
are reported: no choice was made on those.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.data.arrays import VectorsInvalid

SHARE = 0.05
MOST, LEAST = 20_000, 64  # rows put aside
MOST_GIVEN, LEAST_GIVEN = 40_000, 16  # rows used of those that a user has put aside
BLOCKS, FEW_BLOCKS = 32, 16  # the latter where blocks of the former would be very short
GUARD = 8  # rows on either side of a block that are not used, or half as many as the block has
LEAST_ROWS = 5 * LEAST


class TooFewRows(VectorsInvalid):
    pass


@dataclass(frozen=True)
class HeldOutRows:
    """Numbers of rows that are not learned from, ascending."""

    choice: NDArray[np.int64]
    report: NDArray[np.int64]


def put_aside(n_rows: int) -> tuple[NDArray[np.int64], HeldOutRows]:
    """The rows to learn from, and those that are put aside."""
    if n_rows < LEAST_ROWS:
        raise TooFewRows(
            f"There are {n_rows} rows, and some must be put aside to measure on: bring at least"
            f" {LEAST_ROWS}, or give rows to measure on with --valid-hidden and --valid-labels."
        )
    blocks = spread_blocks(n_rows, min(MOST, max(LEAST, round(SHARE * n_rows))))
    guard = min(GUARD, len(blocks[0]) // 2)
    learned = np.ones(n_rows, np.bool_)
    for block in blocks:
        learned[max(0, block.start - guard) : block.stop + guard] = False
    return np.flatnonzero(learned), in_turns(blocks)


def in_halves(n_rows: int) -> HeldOutRows:
    """Rows that a user has put aside, for choices and for reported figures."""
    if n_rows < LEAST_GIVEN:
        raise TooFewRows(
            f"There are {n_rows} validation rows: give at least {LEAST_GIVEN}, or none, so that"
            " some of the training rows are put aside."
        )
    return in_turns(spread_blocks(n_rows, min(n_rows, MOST_GIVEN)))


def unseen(n_rows: int, *, given: bool) -> NDArray[np.int64]:
    """Rows of a file that a layer may be measured on after it was trained with the file.

    Those of `given` validation rows that no choice was made on; of training rows those that were
    put aside for reported figures. All, if a layer could not have been trained with so few.
    """
    everything = np.arange(n_rows)
    if given and n_rows >= LEAST_GIVEN:
        return np.setdiff1d(everything, in_halves(n_rows).choice)
    return put_aside(n_rows)[1].report if not given and n_rows >= LEAST_ROWS else everything


def spread_blocks(n_rows: int, wanted: int) -> list[range]:
    """Blocks of equal length at equal distances, about `wanted` rows together."""
    count = BLOCKS if wanted >= BLOCKS**2 else FEW_BLOCKS
    length = wanted // count
    starts = ((2 * number + 1) * n_rows // count - length for number in range(count))
    return [range(start // 2, start // 2 + length) for start in starts]


def in_turns(blocks: Sequence[range]) -> HeldOutRows:
    choice, report = (np.concatenate([np.array(b) for b in blocks[first::2]]) for first in (0, 1))
    return HeldOutRows(choice, report)
