"""A head's rows and lists of its classes, as the compiled loops take them: one record of arrays.

N classes, D hidden, K experts, L lists, R classes of all experts.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.engine.kernels.borrowed import array_at
from service.engine.kernels.jit import Floats, Integers, inlined

LONGEST, SLACK = 0, 1  # places in `facts`
PACKED = 24  # numbers that `pack` makes


class ClassLists(NamedTuple):
    """Arrays are contiguous and aligned. The last list holds all classes; before it there may be
    one for each expert."""

    gate: Floats  # [D K] by column
    gate_bias: Floats  # [K]
    weights: Floats  # [N D]
    quantised: NDArray[np.int8]  # [N D]
    offsets: Integers  # [L+1] where each list begins in those below
    classes: NDArray[np.int32]  # [R+N]
    scales: Floats  # [R+N] of these classes; so are the others
    errors: Floats  # [R+N]
    lengths: Floats  # [R+N]
    biases: Floats  # [R+N], or empty
    rest: Floats  # [K (D+1)], or empty
    facts: NDArray[np.float64]  # the longest int8 row, and what adding a bias may round


def pack(lists: ClassLists) -> Integers:
    """Their addresses and lengths in one array, valid as long as they are kept; see `layer`."""
    if not all(array.flags.c_contiguous and array.flags.aligned for array in lists):
        raise ValueError("The loops need arrays that are contiguous and aligned.")
    return np.array(
        [number for array in lists for number in (array.ctypes.data, array.size)], np.int64
    )


@inlined
def unpack(packed: Integers) -> ClassLists:
    return ClassLists(
        array_at(packed[0], packed[1], np.float32),
        array_at(packed[2], packed[3], np.float32),
        array_at(packed[4], packed[5], np.float32),
        array_at(packed[6], packed[7], np.int8),
        array_at(packed[8], packed[9], np.int64),
        array_at(packed[10], packed[11], np.int32),
        array_at(packed[12], packed[13], np.float32),
        array_at(packed[14], packed[15], np.float32),
        array_at(packed[16], packed[17], np.float32),
        array_at(packed[18], packed[19], np.float32),
        array_at(packed[20], packed[21], np.float32),
        array_at(packed[22], packed[23], np.float64),
    )
