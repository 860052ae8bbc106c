"""HTTP/1.1 without sockets: where a server is, what its bytes say, and what a failure is called.

The answers are parsed by llhttp (`httptools`), as the server parses requests.
"""

import os
import ssl
from pathlib import Path
from time import monotonic
from typing import NamedTuple
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from service.client.errors import (
    AnswerMalformed,
    ClientError,
    DeadlineExceeded,
    Dropped,
    NotTrusted,
    Unavailable,
    WrongAddress,
)

RECEIVE_BYTES = 65_536
NOT_HTTP = (HttpParserError, HttpParserUpgrade)
Verify = bool | str | Path | ssl.SSLContext


class Address(NamedTuple):
    host: str
    port: int
    authority: str  # host and port as the Host header has them
    prefix: str  # what comes before every path
    secure: bool

    @property
    def url(self) -> str:
        return f"http{'s' if self.secure else ''}://{self.authority}{self.prefix}"


def address(url: str) -> Address:
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode()
    except ValueError:  # of which the one about names is a kind
        parts, port, host = urlsplit(""), None, ""
    rest = parts.username or parts.password or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or not host or port == 0 or rest:
        raise WrongAddress(f"{url!r} is not a URL of the form http://host:port or https://host.")
    secure = parts.scheme == "https"
    named = f"[{host}]" if ":" in host else host
    authority = named if port is None else f"{named}:{port}"
    prefix = parts.path.rstrip("/")
    if not prefix.isascii() or " " in prefix:
        raise WrongAddress(f"The path of {url!r} must be percent-encoded.")
    return Address(host, port or (443 if secure else 80), authority, prefix, secure)


def tls_context(where: Address, verify: Verify) -> ssl.SSLContext | None:
    """For a connection to there; None if it is plain."""
    if not where.secure:
        return None
    if isinstance(verify, ssl.SSLContext):
        return verify
    if isinstance(verify, str | Path):
        path = Path(verify)
        try:
            if path.is_dir():
                return ssl.create_default_context(capath=path)
            return ssl.create_default_context(cafile=path)
        except OSError as error:  # of which the one about certificates is a kind
            raise NotTrusted(f"The certificates of {path} cannot be read.") from error
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class Deadline(NamedTuple):
    at: float  # by the clock `monotonic`
    seconds: float  # how long there was from the start

    @property
    def left(self) -> float:
        return self.at - monotonic()

    def is_over(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"No answer came within {self.seconds:g} seconds; a larger timeout= waits longer."
        )


class Reply(NamedTuple):
    status: int
    headers: dict[bytes, bytes]  # names in lower case
    body: bytes
    keeps: bool  # whether the connection may be used again

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("utf-8", "replace")


class ReplyReader:
    """The replies of one connection, from pieces that may be cut anywhere."""

    def __init__(self) -> None:
        self._parser = HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._headers_are_complete = False
        self._reply: Reply | None = None

    def feed(self, data: bytes) -> Reply | None:
        """The reply, if this completes it. Raises one of NOT_HTTP."""
        self._parser.feed_data(data)
        reply, self._reply = self._reply, None
        return reply

    def end(self) -> Reply | None:
        """The reply, if it is one that ends with its connection."""
        announced = {b"content-length", b"transfer-encoding"} & self._headers.keys()
        if not self._headers_are_complete or announced:
            return None
        return self._whole(keeps=False)

    # --- what the parser finds ---------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._headers_are_complete = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        reply = self._whole(keeps=self._parser.should_keep_alive())
        if reply.status >= 200:  # or it only says that a reply will come
            self._reply = reply

    def _whole(self, *, keeps: bool) -> Reply:
        reply = Reply(self._parser.get_status_code(), self._headers, b"".join(self._body), keeps)
        self._headers, self._body, self._headers_are_complete = {}, [], False
        return reply


def not_reached(where: Address, error: OSError, deadline: Deadline) -> ClientError:
    """No connection could be made."""
    if isinstance(error, TimeoutError):
        return deadline.is_over()
    if isinstance(error, ssl.SSLCertVerificationError):
        return NotTrusted(
            f"The certificate of {where.url} is not trusted ({error.verify_message}):"
            " verify= takes the file of its authority, or an ssl.SSLContext."
        )
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return NotTrusted(f"No TLS is spoken with {where.url} ({error.reason}).")
    return Unavailable(f"No server answers at {where.url} ({_reason(error)}).")


def _reason(error: OSError) -> str:
    """In the system's words, whoever has raised it."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


def broken(
    where: Address, error: Exception, deadline: Deadline, *, reused: bool = False
) -> ClientError:
    """A connection was there, and no whole reply came."""
    if isinstance(error, TimeoutError):
        return deadline.is_over()
    if isinstance(error, NOT_HTTP):
        return AnswerMalformed(f"What answers at {where.url} speaks no HTTP ({error}).")
    if isinstance(error, ssl.SSLError) and not isinstance(
        error, ssl.SSLEOFError | ssl.SSLZeroReturnError
    ):
        return NotTrusted(f"The TLS connection to {where.url} failed ({error.reason}).")
    return Dropped(f"{where.url} ended the connection before its answer was whole.", reused=reused)
