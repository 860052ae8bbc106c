"""What a browser says of a request: which host it was meant for, and which page has sent it.

A page of any origin can make a browser send requests to a server that only the browser can reach.
Such a request names the page's origin, or, where the page has taken over a name of the server
(DNS rebinding), a host that is not the server's.
"""

from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

Header = tuple[bytes, bytes]

OWN_PAGE = ("same-origin", "none")  # Sec-Fetch-Site; none: the user has typed the address
ANY_SUBDOMAIN = "*."


def is_for(headers: Iterable[Header], hosts: Collection[str]) -> bool:
    """Whether the one Host header names a host that is listed; `*.` stands for any subdomain."""
    named = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
    if len(named) != 1:
        return False
    host = named[0]
    host = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
    return any(
        host.endswith(listed[1:]) if listed.startswith(ANY_SUBDOMAIN) else host == listed
        for listed in map(str.lower, hosts)
    )


def is_cross_site(headers: Iterable[Header], allowed: Collection[str]) -> bool:
    """Whether the page of another origin has sent it, unless that origin is allowed."""
    said = {name: value.decode("latin-1") for name, value in headers}
    origin, site = said.get(b"origin"), said.get(b"sec-fetch-site")
    if origin is not None and (origin in allowed or "*" in allowed):
        return False
    if site is not None:
        return site not in OWN_PAGE
    if origin is None:  # no browser
        return False
    try:
        return urlsplit(origin).netloc.lower() != said.get(b"host", "").lower()
    except ValueError:
        return True
