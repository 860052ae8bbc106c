"""Arrays without an owner, for compiled loops.

Numba counts the owners of an array at every slice and every call, atomically, which in a small
search took longer than the arithmetic. Arrays that are only addresses are not counted. Whoever
borrows one keeps the array that it came from until it is done: as an argument of the caller's, or
by using it afterwards.
"""

from typing import Any

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from service.engine.kernels.intrinsics import pointer
from service.engine.kernels.jit import inlined


@inlined
def borrowed(array: NDArray[Any]) -> NDArray[Any]:
    return carray(pointer(array.ctypes.data), array.shape, array.dtype)


@inlined
def words(space: NDArray[np.float64], begin: int, n: int) -> NDArray[np.int64]:
    """A part of borrowed space, as whole numbers."""
    return space[begin : begin + n].view(np.int64)
