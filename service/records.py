"""What the .npy answer holds: one record for each row."""

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=64)
def record(k: int) -> np.dtype[np.void]:
    """np.load(file)["classes"] is [B,k], and so on."""
    return np.dtype(
        [
            ("classes", "<i8", (k,)),
            ("log_probs", "<f4", (k,)),
            ("experts", "<i8"),
            ("gates", "<f4"),
        ]
    )
