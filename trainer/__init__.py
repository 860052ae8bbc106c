"""Learns the doubly sparse layer and exports it as a bundle.

`from trainer import capture, DSSoftmax`. `DSSoftmax` is imported when it is asked for: commands
that need no PyTorch import this package too.
"""

from typing import TYPE_CHECKING

# The function takes the place of the package of the same name as an attribute of `trainer`.
from trainer.capture.capture import capture as capture

if TYPE_CHECKING:
    from trainer.layer import DSSoftmax as DSSoftmax

__all__ = ["DSSoftmax", "capture"]


def __getattr__(name: str) -> object:
    if name != "DSSoftmax":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainer.layer import DSSoftmax

    return DSSoftmax
