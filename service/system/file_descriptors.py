"""File descriptors: raises their limit, and tells errors that mean there are none left."""

import errno
import resource
from time import monotonic

MOST = 65_536  # more than one server can use
QUIET_SECONDS = 60.0

# Errors of `accept` that are the system's, not the client's: trying again at once would fail too.
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def raise_limit() -> int:
    """Raise the soft limit, usually 1,024, to the hard one, but to no more than MOST."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(MOST, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


class RateLimited:
    """Lets one line through in a while, so that an error that keeps happening floods no log."""

    def __init__(self, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._quiet_seconds = quiet_seconds
        self._silent_until = 0.0

    def allow(self) -> bool:
        if monotonic() < self._silent_until:
            return False
        self._silent_until = monotonic() + self._quiet_seconds
        return True
