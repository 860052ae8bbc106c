"""The time by which a whole call must end: all its tries, pauses and parts."""

from time import monotonic
from typing import NamedTuple

from service.client.errors import DeadlineExceeded


class Deadline(NamedTuple):
    at: float  # by the clock `monotonic`
    seconds: float  # the call's timeout

    @property
    def left(self) -> float:
        return self.at - monotonic()

    def exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"No answer came within {self.seconds:g} seconds; a larger timeout= waits longer."
        )
