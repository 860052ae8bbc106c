"""Stands between a connection and its transport: answers leave in pieces, as the client reads them.

A transport takes whatever it is given: it copies, and under TLS encrypts, all that its client has
not read, and under TLS does not even say how much that is. So it is given a piece at a time, and
what waits here is counted from the moment it is written.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from service.http.body import ByteBudget

PIECE_BYTES = 65_536  # also what a transport may hold before it says that it is full
# The kernel takes no more than this ahead of what the client has room for. By default it takes
# megabytes: an answer that nobody reads would look sent, and its connection idle.
KERNEL_BYTES = 131_072


class PacedTransport(asyncio.Transport):
    """`on_blocked` hears when what was written begins to wait for the client, and when it ends."""

    def __init__(
        self,
        transport: asyncio.Transport,
        budget: ByteBudget,
        on_blocked: Callable[[bool], None],
    ) -> None:
        self._transport = transport
        self._budget = budget
        self._on_blocked = on_blocked
        self._unsent: deque[memoryview] = deque()  # what the transport was not given yet
        self._unsent_bytes = 0
        self._counted_bytes = 0  # by the budget
        self._full = False  # the transport is
        self._blocked = False
        self._handing_over = False
        self._closing = False
        self._read_pauses: set[str] = set()  # who does not want to read
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        transport.set_write_buffer_limits(PIECE_BYTES)
        client = transport.get_extra_info("socket")
        with suppress(OSError):  # not every socket is a TCP socket
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, KERNEL_BYTES)

    # --- writing -----------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._unsent and not self._full and len(data) <= PIECE_BYTES:
            self._transport.write(data)
        elif not self._closing:
            self._unsent.append(memoryview(data))
            self._unsent_bytes += len(data)
            self._hand_over()

    def _hand_over(self) -> None:
        self._handing_over = True
        while self._unsent and not self._full:
            first = self._unsent[0]
            if len(first) > PIECE_BYTES:
                self._unsent[0] = first[PIECE_BYTES:]
                first = first[:PIECE_BYTES]
            else:
                self._unsent.popleft()
            self._unsent_bytes -= len(first)
            self._transport.write(first)
        self._handing_over = False
        self._count()
        if self._closing and not self._unsent:
            self._transport.close()

    def _count(self) -> None:
        blocked = self._full or bool(self._unsent)
        waiting = self.get_write_buffer_size() if blocked else 0
        self._budget.taken += waiting - self._counted_bytes
        self._counted_bytes = waiting
        if blocked != self._blocked:
            self._blocked = blocked
            self._on_blocked(blocked)

    def transport_full(self) -> None:
        """The transport may be given nothing for now (`pause_writing`)."""
        self._full = True
        if not self._handing_over:
            self._count()

    def transport_ready(self) -> None:
        """The transport may be given more (`resume_writing`)."""
        self._full = False
        self._hand_over()

    def get_write_buffer_size(self) -> int:
        """What the client has not read, but for what the kernel has."""
        return self._unsent_bytes + self._transport.get_write_buffer_size()

    # --- reading -----------------------------------------------------------------------------

    def pause_reading(self, reason: str = "uvicorn") -> None:
        if not self._read_pauses:
            self._transport.pause_reading()
        self._read_pauses.add(reason)

    def resume_reading(self, reason: str = "uvicorn") -> None:
        if reason in self._read_pauses:
            self._read_pauses.discard(reason)
            if not self._read_pauses and not self._transport.is_closing():
                self._transport.resume_reading()

    # --- ending ------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        """Once everything has left."""
        self._closing = True
        if self._unsent:
            self.pause_reading("closing")
        else:
            self._transport.close()

    def abort(self) -> None:
        self.forget()
        self._transport.abort()

    def forget(self) -> None:
        """Lets go of what is unsent: the client will never read it."""
        self._closing = True
        self._full = False
        self._unsent.clear()
        self._unsent_bytes = 0
        self._budget.taken -= self._counted_bytes
        self._counted_bytes = 0
