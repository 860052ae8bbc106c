"""Ids of requests: the client's own, if it sent one that is fit to be logged, or a new one."""

import itertools
import os
import re
from contextvars import ContextVar

HEADER = b"x-request-id"
FIT = re.compile(rb"[!-~]{1,128}")

# Of the request that is being handled, for the log; inference requests do not set it.
current: ContextVar[str | None] = ContextVar("request_id", default=None)

_process = os.urandom(6).hex().encode()
_numbers = itertools.count(1)


def _new_process_name() -> None:
    global _process
    _process = os.urandom(6).hex().encode()


os.register_at_fork(after_in_child=_new_process_name)  # workers are forked


def new() -> bytes:
    """Unique without asking the system: a random name for the process, then a number."""
    return b"%b-%x" % (_process, next(_numbers))


def accepted(sent: bytes | None) -> bytes:
    return sent if sent is not None and FIT.fullmatch(sent) else new()
