"""The system's monotonic clock, read by compiled loops."""

import time
from typing import Any

from numba import types

from service.engine.kernels.jit import Integers, ordered

MONOTONIC = int(time.CLOCK_MONOTONIC)
clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))


@ordered
def nanoseconds(clock: Integers) -> int:
    """The time now; `clock` [2] is where the system writes it."""
    clock_gettime(MONOTONIC, clock.ctypes.data)
    return int(clock[0] * 1_000_000_000 + clock[1])
