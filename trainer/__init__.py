"""Learns the doubly sparse layer and exports it as a bundle.

`from trainer import capture, DSSoftmax`; both are imported when they are asked for, since commands
that need no PyTorch import this package too.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.capturing import capture as capture
    from trainer.layer import DSSoftmax as DSSoftmax

__all__ = ["DSSoftmax", "capture"]

_HOMES = {"DSSoftmax": "trainer.layer", "capture": "trainer.capturing"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
