"""Connections of an event loop, kept open between requests."""

import asyncio
import ssl

from service.client.errors import ClientClosed
from service.client.http1 import (
    NOT_HTTP,
    Address,
    Deadline,
    Reply,
    ReplyReader,
    broken,
    not_reached,
)

MOST_CONNECTIONS = 100


class Stream(asyncio.Protocol):
    """One connection."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._reader = ReplyReader()
        self._reply: asyncio.Future[Reply] | None = None  # of the request under way
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def exchange(self, message: bytes, deadline: Deadline) -> Reply:
        """Raises OSError or one of NOT_HTTP."""
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
    def is_clean(self) -> bool:
        """Whether another request may follow: a server may answer before it has read all."""
        return not self.transport.is_closing() and not self.transport.get_write_buffer_size()

    def _fail(self, error: Exception) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._reply is None or self._reply.done():
            self.transport.abort()  # nobody asked
            return
        try:
            reply = self._reader.feed(data)
        except NOT_HTTP as error:
            self._fail(error)
        else:
            if reply is not None:
                self._reply.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            reply = self._reader.end()
            if reply is None:
                self._fail(exc or ConnectionResetError())
            else:
                self._reply.set_result(reply)
        self.lost.set_result(None)


class Streams:
    """At most so many connections, each for one request at a time."""

    def __init__(self, where: Address, tls: ssl.SSLContext | None) -> None:
        self._where = where
        self._tls = tls
        self._idle: list[Stream] = []
        self._room = asyncio.Semaphore(MOST_CONNECTIONS)
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the first request
        self._closed = False

    async def exchange(self, message: bytes, deadline: Deadline, *, fresh: bool) -> Reply:
        """`fresh`: on a new connection; those that were idle are likely to be gone as well."""
        if self._closed:
            raise ClientClosed("The client is closed.")
        self._stay_in_the_loop()
        if fresh:
            self._forget()
        await self._enter(deadline)
        try:
            return await self._exchange(message, deadline, fresh=fresh)
        finally:
            self._room.release()

    def _stay_in_the_loop(self) -> None:
        """Connections of a loop that has ended would never answer."""
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise ClientClosed(
                "An AsyncClient belongs to one event loop: make one inside each asyncio.run()."
            )

    async def _enter(self, deadline: Deadline) -> None:
        if not self._room.locked():
            await self._room.acquire()  # which is immediate
            return
        try:
            async with asyncio.timeout(deadline.left):
                await self._room.acquire()
        except TimeoutError:
            raise deadline.is_over() from None

    async def _exchange(self, message: bytes, deadline: Deadline, *, fresh: bool) -> Reply:
        idle = None if fresh else self._take()
        stream = await self._connect(deadline) if idle is None else idle
        keeps = False
        try:
            reply = await stream.exchange(message, deadline)
            keeps = reply.keeps and stream.is_clean and not self._closed
            return reply
        except (OSError, *NOT_HTTP) as error:
            raise broken(self._where, error, deadline, reused=idle is not None) from error
        finally:
            if keeps:
                self._idle.append(stream)
            else:
                stream.transport.abort()

    def _take(self) -> Stream | None:
        while self._idle:
            stream = self._idle.pop()
            if not stream.transport.is_closing():
                return stream
        return None

    async def _connect(self, deadline: Deadline) -> Stream:
        where = self._where
        name = None if self._tls is None else where.host
        try:
            async with asyncio.timeout(deadline.left):
                _, stream = await asyncio.get_running_loop().create_connection(
                    Stream, where.host, where.port, ssl=self._tls, server_hostname=name
                )
        except OSError as error:
            raise not_reached(where, error, deadline) from error
        return stream

    def _forget(self) -> list[Stream]:
        """Close what is idle."""
        forgotten, self._idle = self._idle, []
        for stream in forgotten:
            stream.transport.abort()
        return forgotten

    async def close(self) -> None:
        self._closed = True
        for stream in self._forget():
            await stream.lost
