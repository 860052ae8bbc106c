"""Biases, in one way everywhere: a matrix's last column, for a 1 at the end of a hidden vector.

b rows, D hidden, V rows of a matrix.
"""

from torch import Tensor
from torch.nn.functional import pad


def with_one(hidden: Tensor) -> Tensor:
    """Hidden vectors [b,D] with a 1 at the end of each: [b,D+1]."""
    return pad(hidden, (0, 1), value=1.0)


def logits(hidden: Tensor, matrix: Tensor) -> Tensor:
    """Products of hidden vectors [b,D] with rows [V,D], or with rows and biases [V,D+1]: [b,V]."""
    biased = matrix.shape[1] > hidden.shape[1]
    return (with_one(hidden) if biased else hidden) @ matrix.T
