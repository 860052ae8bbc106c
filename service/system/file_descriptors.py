"""File descriptors: as many as the system allows, and what to do when there are none left."""

import errno
import resource
from time import monotonic

MOST = 65_536  # more connections than one server can have any use for
QUIET_SECONDS = 60.0

# What `accept` says when the system, not the client, is at fault. Trying again at once is in vain.
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def raise_limit() -> int:
    """Take what the hard limit allows. The usual soft limit of 1,024 is for old programs' sake."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(MOST, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


class RateLimited:
    """Says whether it is time for another line of a log that would else be flooded."""

    def __init__(self, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._quiet_seconds = quiet_seconds
        self._silent_until = 0.0

    def now(self) -> bool:
        if monotonic() < self._silent_until:
            return False
        self._silent_until = monotonic() + self._quiet_seconds
        return True
