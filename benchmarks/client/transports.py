"""HTTP libraries in the place of this project's connections, under the unchanged core.

Each transport has the one method that `Client` or `AsyncClient` calls, `exchange`: a message of the
core goes in, a `Reply` or a named error comes out. Each uses the leanest public way of its library:
no redirects, no proxies of the environment, no cookies, no decoding of bodies.
"""

import asyncio
import ssl
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from typing import NamedTuple

import aiohttp
import httpx
import pyreqwest.exceptions
import urllib3
from pyreqwest.client import Client as ReqwestClient
from pyreqwest.client import ClientBuilder, SyncClient, SyncClientBuilder
from pyreqwest.http import Url
from yarl import URL

from service.client.address import Address
from service.client.deadline import Deadline
from service.client.errors import ClientClosed, ClientError, Dropped, NotTrusted, Unavailable
from service.client.http1 import Reply

END_OF_HEAD = b"\r\n\r\n"
MOST_CONNECTIONS = 100
FRAMING = {"Host", "Content-Length"}  # headers that every library writes itself
Headers = dict[str, str]


class Request(NamedTuple):
    """A message of the core in the words of the libraries."""

    method: str
    target: str
    headers: Headers
    body: memoryview | None


def parsed(message: bytes) -> Request:
    """Costs about a microsecond, since equal request heads are parsed once and no body is copied.

    A core made for a library would hand over these four directly.
    """
    end = message.index(END_OF_HEAD)
    method, target, headers = _parsed_head(message[:end])
    body = memoryview(message)[end + len(END_OF_HEAD) :]
    return Request(method, target, headers, body if body.nbytes else None)


@lru_cache(maxsize=64)
def _parsed_head(head: bytes) -> tuple[str, str, Headers]:
    first, *lines = head.decode().split("\r\n")
    method, target, _ = first.split(" ")
    fields = dict(line.split(": ", 1) for line in lines)
    return method, target, {name: fields[name] for name in fields if name not in FRAMING}


def base_url(where: Address) -> str:
    """Without the prefix, which is a part of the messages' targets."""
    return where._replace(prefix="").url


def reply(status: int, headers: Mapping[str, str], body: bytes) -> Reply:
    """The library itself decides whether the connection is kept."""
    named = {name.lower().encode(): value.encode() for name, value in headers.items()}
    return Reply(status, named, body, True)


def failure(
    where: Address, error: Exception, *, unreached: bool, reused: bool = False
) -> ClientError:
    """The client's name for what a library raised, other than a timeout."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return NotTrusted(f"No TLS is spoken with {where.url} ({cause.reason}).")
        cause = cause.__cause__ or cause.__context__
    if unreached:
        return Unavailable(f"No server answers at {where.url} ({error}).")
    return Dropped(f"{where.url} ended the connection before its answer was whole.", reused=reused)


class Urllib3:
    """Has a timeout for each read, and none for a whole answer."""

    def __init__(self, where: Address, tls: ssl.SSLContext | None) -> None:
        self._where = where
        self._pool = (
            urllib3.HTTPConnectionPool(where.host, where.port, maxsize=MOST_CONNECTIONS)
            if tls is None
            else urllib3.HTTPSConnectionPool(
                where.host, where.port, maxsize=MOST_CONNECTIONS, ssl_context=tls
            )
        )

    def exchange(self, message: bytes, deadline: Deadline, *, fresh: bool) -> Reply:
        method, target, headers, body = parsed(message)
        made = self._pool.num_connections
        try:
            response = self._pool.urlopen(
                method,
                target,
                body,
                headers,
                retries=False,
                redirect=False,
                timeout=deadline.left,
                decode_content=False,
            )
        except urllib3.exceptions.NewConnectionError as error:
            raise failure(self._where, error, unreached=True) from error
        except urllib3.exceptions.TimeoutError as error:
            raise deadline.exceeded() from error
        except urllib3.exceptions.HTTPError as error:
            reused = not fresh and made == self._pool.num_connections
            raise failure(self._where, error, unreached=False, reused=reused) from error
        return reply(response.status, response.headers, response.data)

    def close(self) -> None:
        self._pool.close()


def _timeouts(deadline: Deadline) -> dict[str, dict[str, float]]:
    return {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), deadline.left)}


LIMITS = httpx.Limits(max_connections=MOST_CONNECTIONS, max_keepalive_connections=MOST_CONNECTIONS)


@lru_cache(maxsize=64)
def _httpx_url(base: str, target: str) -> httpx.URL:
    return httpx.URL(base + target)


class _Httpx:
    def __init__(self, where: Address) -> None:
        self._where = where
        self._base = base_url(where)

    def _request(self, message: bytes, deadline: Deadline) -> httpx.Request:
        method, target, headers, body = parsed(message)
        return httpx.Request(
            method,
            _httpx_url(self._base, target),
            headers=headers,
            content=None if body is None else bytes(body),
            extensions=_timeouts(deadline),
        )

    def _failure(self, error: httpx.TransportError, deadline: Deadline) -> ClientError:
        if isinstance(error, httpx.TimeoutException):
            return deadline.exceeded()
        unreached = isinstance(error, httpx.ConnectError)
        return failure(self._where, error, unreached=unreached)


class Httpx(_Httpx):
    """Httpx's transport, without its `Client`, whose every request costs more.

    Has a timeout for each read, and none for a whole answer.
    """

    def __init__(self, where: Address, tls: ssl.SSLContext | None) -> None:
        super().__init__(where)
        self._transport = httpx.HTTPTransport(
            verify=tls or ssl.create_default_context(), limits=LIMITS, trust_env=False
        )

    def exchange(self, message: bytes, deadline: Deadline, *, fresh: bool) -> Reply:  # noqa: ARG002
        try:
            response = self._transport.handle_request(self._request(message, deadline))
            return reply(response.status_code, response.headers, response.read())
        except httpx.TransportError as error:
            raise self._failure(error, deadline) from error

    def close(self) -> None:
        self._transport.close()


class AsyncHttpx(_Httpx):
    def __init__(self, where: Address, tls: ssl.SSLContext | None) -> None:
        super().__init__(where)
        self._transport = httpx.AsyncHTTPTransport(
            verify=tls or ssl.create_default_context(), limits=LIMITS, trust_env=False
        )

    async def exchange(self, message: bytes, deadline: Deadline, *, fresh: bool) -> Reply:  # noqa: ARG002
        try:
            async with asyncio.timeout(deadline.left):
                response = await self._transport.handle_async_request(
                    self._request(message, deadline)
                )
                return reply(response.status_code, response.headers, await response.aread())
        except TimeoutError as error:
            raise deadline.exceeded() from error
        except httpx.TransportError as error:
            raise self._failure(error, deadline) from error

    async def close(self) -> None:
        await self._transport.aclose()


@lru_cache(maxsize=64)
def _yarl_url(base: str, target: str) -> URL:
    return URL(base + target, encoded=True)


class Aiohttp:
    def __init__(self, where: Address, tls: ssl.SSLContext | None) -> None:
        self._where = where
        self._tls = tls
        self._base = base_url(where)
        self._session: aiohttp.ClientSession | None = None  # made in its event loop

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MOST_CONNECTIONS, ssl=self._tls or True),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("Accept-Encoding",),
                auto_decompress=False,
                trust_env=False,
            )
        return self._session

    async def exchange(self, message: bytes, deadline: Deadline, *, fresh: bool) -> Reply:
        method, target, headers, body = parsed(message)
        session = self._opened()
        try:
            async with session.request(
                method,
                _yarl_url(self._base, target),
                data=body,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=deadline.left),
            ) as response:
                return reply(response.status, response.headers, await response.read())
        except TimeoutError as error:
            raise deadline.exceeded() from error
        except aiohttp.ClientError as error:
            unreached = isinstance(error, aiohttp.ClientConnectorError)
            raise failure(self._where, error, unreached=unreached, reused=not fresh) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


@lru_cache(maxsize=64)
def _reqwest_url(base: str, target: str) -> Url:
    return Url(base + target)


def _reqwest(builder: ClientBuilder | SyncClientBuilder) -> None:
    builder.no_proxy().follow_redirects(False).referer(False)
    builder.gzip(False).brotli(False).zstd(False).deflate(False)


class _Pyreqwest:
    """Takes no ssl.SSLContext: it has a TLS of its own."""

    def __init__(self, where: Address) -> None:
        self._where = where
        self._base = base_url(where)

    def _failure(
        self, error: pyreqwest.exceptions.PyreqwestError, deadline: Deadline
    ) -> ClientError:
        if isinstance(error, pyreqwest.exceptions.RequestTimeoutError):
            return deadline.exceeded()
        if isinstance(error, pyreqwest.exceptions.ClientClosedError):
            return ClientClosed("The client is closed.")
        unreached = isinstance(error, pyreqwest.exceptions.ConnectError)
        return failure(self._where, error, unreached=unreached)


class Pyreqwest(_Pyreqwest):
    def __init__(self, where: Address, tls: ssl.SSLContext | None) -> None:  # noqa: ARG002
        super().__init__(where)
        builder = SyncClientBuilder()
        _reqwest(builder)
        self._client: SyncClient = builder.build()

    def exchange(self, message: bytes, deadline: Deadline, *, fresh: bool) -> Reply:  # noqa: ARG002
        method, target, headers, body = parsed(message)
        request = self._client.request(method, _reqwest_url(self._base, target)).headers(headers)
        if body is not None:
            request.body_bytes(body)
        try:
            response = request.timeout(timedelta(seconds=deadline.left)).build().send()
            return reply(response.status, response.headers, response.bytes().to_bytes())
        except pyreqwest.exceptions.PyreqwestError as error:
            raise self._failure(error, deadline) from error

    def close(self) -> None:
        self._client.close()


class AsyncPyreqwest(_Pyreqwest):
    def __init__(self, where: Address, tls: ssl.SSLContext | None) -> None:  # noqa: ARG002
        super().__init__(where)
        builder = ClientBuilder()
        _reqwest(builder)
        self._client: ReqwestClient = builder.build()

    async def exchange(self, message: bytes, deadline: Deadline, *, fresh: bool) -> Reply:  # noqa: ARG002
        method, target, headers, body = parsed(message)
        request = self._client.request(method, _reqwest_url(self._base, target)).headers(headers)
        if body is not None:
            request.body_bytes(body)
        try:
            response = await request.timeout(timedelta(seconds=deadline.left)).build().send()
            return reply(response.status, response.headers, (await response.bytes()).to_bytes())
        except pyreqwest.exceptions.PyreqwestError as error:
            raise self._failure(error, deadline) from error

    async def close(self) -> None:
        await self._client.close()
