"""A layer as the compiled loops take it: one record of its arrays.

D hidden, K experts, R classes of all experts.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.engine.kernels.borrowed import array_at
from service.engine.kernels.jit import Floats, Integers, inlined


class Layer(NamedTuple):
    """A gate and its experts; arrays are contiguous and aligned."""

    gate: Floats  # [D K] by column
    gate_bias: Floats  # [K]
    # One expert after the other [R D], each by column, or by row if it is quantised too: float32,
    # or float16 by their bits, as uint16.
    weights: NDArray[Any]
    biases: Floats  # [R], or empty
    quantised: NDArray[np.int8]  # [R D] by row, or empty
    scales: Floats  # [R], or empty
    offsets: Integers  # [K+1] in R
    classes: NDArray[np.int32]  # [R]
    n_classes: int


def pack(layer: Layer) -> Integers:
    """A layer's addresses and lengths in one array, valid as long as the layer is kept.

    numba takes the arguments of a call apart one by one, which for the arrays of a layer costs
    more than to search a small expert.
    """
    arrays = layer[:-1]
    if not all(array.flags.c_contiguous and array.flags.aligned for array in arrays):
        raise ValueError("The loops need arrays that are contiguous and aligned.")
    packed = [number for array in arrays for number in (array.ctypes.data, len(array))]
    return np.array([*packed, layer.n_classes], np.int64)


@inlined
def unpack(packed: Integers, stored: type[np.generic]) -> Layer:
    """The layer of an array that `pack` made; `stored` is the type of its weights."""
    return Layer(
        array_at(packed[0], packed[1], np.float32),
        array_at(packed[2], packed[3], np.float32),
        array_at(packed[4], packed[5], stored),
        array_at(packed[6], packed[7], np.float32),
        array_at(packed[8], packed[9], np.int8),
        array_at(packed[10], packed[11], np.float32),
        array_at(packed[12], packed[13], np.int64),
        array_at(packed[14], packed[15], np.int32),
        packed[16],
    )
