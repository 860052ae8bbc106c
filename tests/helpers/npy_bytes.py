"""An array as the bytes of a .npy file."""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray


def npy_bytes(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()
