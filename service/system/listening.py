"""Stops listening without losing a client.

Whoever is connected when a listening socket closes, but not yet accepted, is cut off, with the
request that it may have sent. So first new clients are kept out, and when those that were
connecting have come in, all are accepted and the socket is closed.
"""

import ctypes
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

CONNECTING_SECONDS = 0.1  # how long those that are connecting are given

SO_ATTACH_FILTER = 26  # of Linux
# Berkeley packet filter: load the byte of the TCP flags; if SYN is set, drop the packet.
FILTER = b"".join(
    struct.pack("=HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load a byte, at 13
        (0x45, 0, 1, 0x02),  # go on if the bit is set, else skip one
        (0x06, 0, 0, 0),  # return 0: drop
        (0x06, 0, 0, 0xFFFFFFFF),  # keep all of it
    )
)


def keep_out_new(listening: socket.socket) -> None:
    """Packets that begin a connection are dropped from now on; clients send them again later."""
    code = ctypes.create_string_buffer(FILTER)
    program = struct.pack("@HP", len(FILTER) // 8, ctypes.addressof(code))
    with suppress(OSError):  # not on this system: someone may be cut off
        listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def accept_all(listening: socket.socket) -> Iterator[socket.socket]:
    """Whoever has connected and was not accepted yet."""
    with suppress(OSError):  # there is nobody left
        while True:
            yield listening.accept()[0]
