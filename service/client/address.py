"""Where the server is: its URL taken apart, and the TLS settings for connections to it."""

import ssl
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from service.client.errors import NotTrusted, WrongAddress

Verify = bool | str | Path | ssl.SSLContext


class Address(NamedTuple):
    host: str
    port: int
    authority: str  # host and port as the Host header has them
    prefix: str  # comes before every path
    secure: bool

    @property
    def url(self) -> str:
        return f"http{'s' if self.secure else ''}://{self.authority}{self.prefix}"


def parse(url: str) -> Address:
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode()
    except ValueError:  # also the base class of what idna raises
        parts, port, host = urlsplit(""), None, ""
    rest = parts.username or parts.password or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or not host or port == 0 or rest:
        raise WrongAddress(f"{url!r} is not a URL of the form http://host:port or https://host.")
    secure = parts.scheme == "https"
    bracketed = f"[{host}]" if ":" in host else host
    authority = bracketed if port is None else f"{bracketed}:{port}"
    prefix = parts.path.rstrip("/")
    if not prefix.isascii() or " " in prefix:
        raise WrongAddress(f"The path of {url!r} must be percent-encoded.")
    return Address(host, port or (443 if secure else 80), authority, prefix, secure)


def tls_context(address: Address, verify: Verify) -> ssl.SSLContext | None:
    """The settings for a connection to that address; None if it is plain HTTP."""
    if not address.secure:
        return None
    if isinstance(verify, ssl.SSLContext):
        return verify
    if isinstance(verify, str | Path):
        path = Path(verify)
        try:
            if path.is_dir():
                return ssl.create_default_context(capath=path)
            return ssl.create_default_context(cafile=path)
        except OSError as error:  # also the base class of ssl.SSLError
            raise NotTrusted(f"The certificates of {path} cannot be read.") from error
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
