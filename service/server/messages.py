"""What the supervisor of several workers, the process that forks them and a worker say."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

# What a worker says: that it exists, with its process id; that it takes connections; that its
# event loop turns, and whether its default model is there.
BORN, READY, BEAT, EMPTY_BEAT = b"b", b"r", b"h", b"e"
# What it is told: to take the connection that comes with it; what a first and a second signal mean.
CONNECTION, TERMINATE, INTERRUPT, AT_ONCE = b"c", b"t", b"i", b"n"

BEAT_SECONDS = 0.25
LONGEST_ORDER = 256


class Orders(BaseModel):
    """What every worker is told when it starts."""

    settings: dict[str, Any]
    folder: Path


class Order(BaseModel):
    """... and what each is told besides."""

    number: int
    replaces: bool  # a worker that died
