"""Connections of one event loop, kept open between requests."""

import asyncio
import ssl

from service.client.address import Address
from service.client.deadline import Deadline
from service.client.error_mapping import connect_error, exchange_error
from service.client.errors import AnswerTooLarge, ClientClosed
from service.client.http1 import NOT_HTTP, Reply, ReplyLimits, ReplyReader

MOST_CONNECTIONS = 100


class AsyncConnection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, limits: ReplyLimits) -> None:
        self._reader = ReplyReader(limits)
        self._reply: asyncio.Future[Reply] | None = None  # to the request under way
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def exchange(self, message: bytes, deadline: Deadline) -> Reply:
        """Sends a request and reads its reply. Raises OSError, AnswerTooLarge or one of
        NOT_HTTP."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Reply] = loop.create_future()
        self._reply = reply
        timer = loop.call_later(deadline.left, self._fail, TimeoutError())
        self.transport.write(message)
        try:
            return await reply
        finally:
            timer.cancel()
            self._reply = None

    @property
    def can_be_reused(self) -> bool:
        """Not if the server answered before it had read the whole request."""
        return not self.transport.is_closing() and not self.transport.get_write_buffer_size()

    def _fail(self, error: Exception) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)

    # --- callbacks of asyncio ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._reply is None or self._reply.done():
            self.transport.abort()  # no request is under way
            return
        try:
            reply = self._reader.feed(data)
        except (AnswerTooLarge, *NOT_HTTP) as error:
            self.transport.pause_reading()
            self._fail(error)
        else:
            if reply is not None:
                self._reply.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            reply = self._reader.end_of_stream()
            if reply is None:
                self._fail(exc or ConnectionResetError())
            else:
                self._reply.set_result(reply)
        self.lost.set_result(None)


class AsyncConnections:
    """At most MOST_CONNECTIONS connections, each for one request at a time."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, limits: ReplyLimits) -> None:
        self._address = address
        self._tls = tls
        self._limits = limits
        self._idle: list[AsyncConnection] = []
        self._room = asyncio.Semaphore(MOST_CONNECTIONS)
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the first request
        self._closed = False

    async def exchange(self, message: bytes, deadline: Deadline, *, fresh: bool) -> Reply:
        """Sends a request and reads its reply, on an idle connection if there is one.

        `fresh` asks for a new connection: the server closed an idle one, so probably the others
        as well.
        """
        if self._closed:
            raise ClientClosed("The client is closed.")
        self._check_loop()
        if fresh:
            self._close_idle()
        await self._wait_for_room(deadline)
        try:
            return await self._exchange(message, deadline, fresh=fresh)
        finally:
            self._room.release()

    def _check_loop(self) -> None:
        """Connections of a loop that has ended would never answer."""
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise ClientClosed(
                "An AsyncClient belongs to one event loop: make one inside each asyncio.run()."
            )

    async def _wait_for_room(self, deadline: Deadline) -> None:
        if not self._room.locked():
            await self._room.acquire()  # does not wait
            return
        try:
            async with asyncio.timeout(deadline.left):
                await self._room.acquire()
        except TimeoutError:
            raise deadline.exceeded() from None

    async def _exchange(self, message: bytes, deadline: Deadline, *, fresh: bool) -> Reply:
        idle = None if fresh else self._take_idle()
        connection = await self._connect(deadline) if idle is None else idle
        keep = False
        try:
            reply = await connection.exchange(message, deadline)
            keep = reply.keep_alive and connection.can_be_reused and not self._closed
            return reply
        except (OSError, *NOT_HTTP) as error:
            raise exchange_error(self._address, error, deadline, reused=idle is not None) from error
        finally:
            if keep:
                self._idle.append(connection)
            else:
                connection.transport.abort()

    def _take_idle(self) -> AsyncConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    async def _connect(self, deadline: Deadline) -> AsyncConnection:
        address = self._address
        name = None if self._tls is None else address.host
        try:
            async with asyncio.timeout(deadline.left):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: AsyncConnection(self._limits),
                    address.host,
                    address.port,
                    ssl=self._tls,
                    server_hostname=name,
                )
        except OSError as error:
            raise connect_error(address, error, deadline) from error
        return connection

    def _close_idle(self) -> list[AsyncConnection]:
        closed, self._idle = self._idle, []
        for connection in closed:
            connection.transport.abort()
        return closed

    async def close(self) -> None:
        self._closed = True
        for connection in self._close_idle():
            await connection.lost
