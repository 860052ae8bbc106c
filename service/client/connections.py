"""Blocking connections: sockets that are kept open between requests and shared by threads."""

import os
import socket
import ssl
from collections import deque
from weakref import WeakSet

from service.client.address import Address
from service.client.deadline import Deadline
from service.client.error_mapping import connect_error, exchange_error
from service.client.errors import ClientClosed
from service.client.http1 import NOT_HTTP, Reply, ReplyLimits, ReplyReader

RECEIVE_BYTES = 65_536


class Connection:
    def __init__(
        self,
        address: Address,
        tls: ssl.SSLContext | None,
        limits: ReplyLimits,
        deadline: Deadline,
    ) -> None:
        self._socket = _connect(address, tls, deadline)
        self._reader = ReplyReader(limits)

    def exchange(self, message: bytes, deadline: Deadline) -> Reply:
        """Sends a request and reads its reply. Raises OSError, AnswerTooLarge or one of
        NOT_HTTP."""
        try:
            self._set_timeout(deadline)
            self._socket.sendall(message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server may have answered before it had read everything
        while True:
            self._set_timeout(deadline)
            data = self._socket.recv(RECEIVE_BYTES)
            reply = self._reader.feed(data) if data else self._reader.end_of_stream()
            if reply is not None:
                return reply
            if not data:
                raise ConnectionResetError

    def _set_timeout(self, deadline: Deadline) -> None:
        left = deadline.left
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def close(self) -> None:
        self._socket.close()


def _connect(address: Address, tls: ssl.SSLContext | None, deadline: Deadline) -> socket.socket:
    made = socket.create_connection((address.host, address.port), max(deadline.left, 1e-6))
    try:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made if tls is None else tls.wrap_socket(made, server_hostname=address.host)
    except BaseException:
        made.close()
        raise


class Connections:
    """As many connections as threads ask at once; a thread never waits for another's."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, limits: ReplyLimits) -> None:
        self._address = address
        self._tls = tls
        self._limits = limits
        self._idle: deque[Connection] = deque()  # append and pop are safe among threads
        self._closed = False
        _all.add(self)

    def exchange(self, message: bytes, deadline: Deadline, *, fresh: bool) -> Reply:
        """Sends a request and reads its reply, on an idle connection if there is one.

        `fresh` asks for a new connection: the server closed an idle one, so probably the others
        as well.
        """
        if self._closed:
            raise ClientClosed("The client is closed.")
        if fresh:
            self.close_idle()
        idle = None if fresh else self._take_idle()
        connection = self._connect(deadline) if idle is None else idle
        keep_alive = False
        try:
            reply = connection.exchange(message, deadline)
            keep_alive = reply.keep_alive
            return reply
        except (OSError, *NOT_HTTP) as error:
            raise exchange_error(self._address, error, deadline, reused=idle is not None) from error
        finally:
            if keep_alive:
                self._idle.append(connection)
            else:
                connection.close()
            if self._closed:  # by another thread during the exchange
                self.close_idle()

    def _connect(self, deadline: Deadline) -> Connection:
        try:
            return Connection(self._address, self._tls, self._limits, deadline)
        except OSError as error:
            raise connect_error(self._address, error, deadline) from error

    def _take_idle(self) -> Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def close_idle(self) -> None:
        while (connection := self._take_idle()) is not None:
            connection.close()

    def close(self) -> None:
        self._closed = True
        self.close_idle()


# A forked process must not use its parent's connections: replies could reach either process.
_all: WeakSet[Connections] = WeakSet()


def _close_inherited() -> None:
    for connections in _all:
        connections.close_idle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
