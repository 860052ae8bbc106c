"""Connections that have sent more than one request take turns.

A client may send requests without waiting for answers. Each connection's next one is taken up only
when its last one is answered, and of all connections only one in each turn of the event loop: so
the clients that wait for their answers never wait for all the requests that others have sent.
"""

import asyncio
from collections import deque
from typing import Protocol


class Waiting(Protocol):
    loop: asyncio.AbstractEventLoop

    def take_turn(self) -> None: ...


class Turns:
    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()

    def wait(self, connection: Waiting) -> None:
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            connection.loop.call_soon(self._next)

    def _next(self) -> None:
        connection = self._waiting[0]
        try:
            connection.take_turn()
        finally:
            self._waiting.popleft()
            if self._waiting:
                connection.loop.call_soon(self._next)
