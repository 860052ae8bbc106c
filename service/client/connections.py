"""Connections that wait: plain sockets, kept open between requests and shared by threads."""

import os
import socket
import ssl
from collections import deque
from weakref import WeakSet

from service.client.errors import ClientClosed
from service.client.http1 import (
    NOT_HTTP,
    RECEIVE_BYTES,
    Address,
    Deadline,
    Reply,
    ReplyReader,
    broken,
    not_reached,
)


class Connection:
    def __init__(self, where: Address, tls: ssl.SSLContext | None, deadline: Deadline) -> None:
        self._socket = _connected(where, tls, deadline)
        self._reader = ReplyReader()

    def exchange(self, message: bytes, deadline: Deadline) -> Reply:
        """Raises OSError or one of NOT_HTTP."""
        try:
            self._wait_at_most(deadline)
            self._socket.sendall(message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server may have answered before it had read all
        while True:
            self._wait_at_most(deadline)
            data = self._socket.recv(RECEIVE_BYTES)
            reply = self._reader.feed(data) if data else self._reader.end()
            if reply is not None:
                return reply
            if not data:
                raise ConnectionResetError

    def _wait_at_most(self, deadline: Deadline) -> None:
        left = deadline.left
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def close(self) -> None:
        self._socket.close()


def _connected(where: Address, tls: ssl.SSLContext | None, deadline: Deadline) -> socket.socket:
    made = socket.create_connection((where.host, where.port), max(deadline.left, 1e-6))
    try:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made if tls is None else tls.wrap_socket(made, server_hostname=where.host)
    except BaseException:
        made.close()
        raise


class Sockets:
    """As many connections as threads ask at once; a thread never waits for another's."""

    def __init__(self, where: Address, tls: ssl.SSLContext | None) -> None:
        self._where = where
        self._tls = tls
        self._idle: deque[Connection] = deque()  # whose ends several threads may use
        self._closed = False
        _all.add(self)

    def exchange(self, message: bytes, deadline: Deadline, *, fresh: bool) -> Reply:
        """`fresh`: on a new connection; those that were idle are likely to be gone as well."""
        if self._closed:
            raise ClientClosed("The client is closed.")
        if fresh:
            self.forget()
        idle = None if fresh else self._take()
        connection = self._connect(deadline) if idle is None else idle
        keeps = False
        try:
            reply = connection.exchange(message, deadline)
            keeps = reply.keeps
            return reply
        except (OSError, *NOT_HTTP) as error:
            raise broken(self._where, error, deadline, reused=idle is not None) from error
        finally:
            if keeps:
                self._idle.append(connection)
            else:
                connection.close()
            if self._closed:  # meanwhile
                self.forget()

    def _connect(self, deadline: Deadline) -> Connection:
        try:
            return Connection(self._where, self._tls, deadline)
        except OSError as error:
            raise not_reached(self._where, error, deadline) from error

    def _take(self) -> Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def forget(self) -> None:
        """Close what is idle."""
        while (connection := self._take()) is not None:
            connection.close()

    def close(self) -> None:
        self._closed = True
        self.forget()


# A forked process must not speak on its parent's connections: answers would go to either.
_all: WeakSet[Sockets] = WeakSet()


def _forget_all() -> None:
    for sockets in _all:
        sockets.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
