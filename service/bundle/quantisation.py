"""How int8 experts are quantised, and how many of their classes are then scored exactly.

D hidden, V classes of one expert.
"""

import numpy as np
from numpy.typing import NDArray

# A query row's numbers are -127..127 steps of its own, a weight row's -63..63. No more, because
# processors without VNNI add two products of u8 and s8 in 16 bits.
ACTIVATION_STEPS = 127
WEIGHT_STEPS = 63
# Of the best classes by int8 this many for each answer, but not fewer than RESCORED_AT_LEAST, are
# scored again with their float32 rows.
RESCORED_PER_ANSWER = 2
RESCORED_AT_LEAST = 16


def quantise(
    weight: NDArray[np.float32],  # [V,D]
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Each weight row in whole steps of its own size, [V,D], and those sizes [V]."""
    largest = np.maximum(np.abs(weight).max(axis=1, initial=0), np.finfo(np.float32).tiny)
    steps = np.rint(weight * (WEIGHT_STEPS / largest.astype(np.float64))[:, None])
    return steps.astype(np.int8), (largest / WEIGHT_STEPS).astype(np.float32)
