"""Who may ask for what: API keys and their scopes.

`query` may ask for answers and read what the server says of itself; `admin` may do everything. A
route says what it needs with `@needs`: probes are open to everyone, and so are the files of the
page at `/`, which hold no secret. A route that says nothing needs `query` to be read and `admin`
for anything else, so that a new one is covered before anyone has thought of it.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, TypeVar

from service.errors import DSSError, Kind
from service.http.auth import origins
from service.http.auth.keys import LONGEST_TOKEN, KeyRing, KeysWrong, read
from service.settings import AccessSettings, Key, Scope
from service.system.file_watch import FileWatch

logger = logging.getLogger(__name__)

Header = tuple[bytes, bytes]

Needs = Literal["nothing", "metrics", "query", "admin"]  # "metrics": what a setting says
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

READING = {"GET", "HEAD", "OPTIONS"}
SCHEME = b"bearer "

NO_KEY = "This needs an API key: send the header 'Authorization: Bearer <key>'."
UNKNOWN_KEY = "The API key is not known."
NO_ADMIN = (
    "This changes the server and needs a key with the scope admin, but no keys are configured:"
    " set access.keys_file, or access.open_admin where everyone may do this."
)


OTHER_HOST = "This server does not answer for the host that the request names (setting hosts)."
CROSS_SITE = (
    "This changes the server and was sent by a page of another origin, which cors.origins does not"
    " allow."
)


class Unauthorized(DSSError):
    """No key, or one that is not known."""

    kind = Kind.UNAUTHENTICATED


class Forbidden(DSSError):
    """The key's scopes do not cover this."""

    kind = Kind.DENIED


class WrongHost(DSSError):
    """The Host header names none of those that this server answers for."""

    kind = Kind.MISDIRECTED


class CrossSite(DSSError):
    """Another origin's page would change the server."""

    kind = Kind.DENIED


Denied = Unauthorized | Forbidden | WrongHost | CrossSite
DENIED = (Unauthorized, Forbidden, WrongHost, CrossSite)


def needs(what: Needs) -> Callable[[Endpoint], Endpoint]:
    """Marks the endpoint of a route: what a client must have to call it."""

    def mark(endpoint: Endpoint) -> Endpoint:
        endpoint.needs = what  # type: ignore[attr-defined]
        return endpoint

    return mark


def needs_of(endpoint: object, method: str) -> Needs:
    """What calling an endpoint needs; None is one that does not exist."""
    by_method: Needs = "query" if method in READING else "admin"
    return getattr(endpoint, "needs", by_method)


class Access:
    """Without keys everyone may do everything but what changes the server."""

    def __init__(
        self,
        settings: AccessSettings | None = None,
        denied: Callable[[str], None] = lambda _: None,
        reload_failed: Callable[[bool], None] = lambda _: None,
        hosts: Collection[str] = (),
        origins: Collection[str] = (),
    ) -> None:
        """`denied` hears of each refusal's reason, `reload_failed` of each reading of the file.

        `hosts` are those that requests may name, if any are given; pages of `origins` may change
        the server, as may its own.
        """
        self._hosts, self._origins = hosts, origins
        self._settings = settings = settings or AccessSettings()
        self._denied = denied
        self._reload_failed = reload_failed
        self.generation = 0  # grows when the keys change: what was allowed must be asked again
        paths = [] if settings.keys_file is None else [settings.keys_file]
        self._file = FileWatch(paths)
        self._ring = KeyRing(configured(settings))
        if self.closed:
            logger.info("Keys: %s.", _listed(self._ring.keys))

    @property
    def closed(self) -> bool:
        """Whether anything is asked of those who query."""
        return bool(self._ring.keys)

    def check(self, needed: Needs, headers: Iterable[Header]) -> None:
        """Raises one of DENIED unless the headers carry a key with what is needed."""
        refusal = self._refusal(needed, headers)
        if refusal is not None:
            reason, error = refusal
            self._denied(reason)
            raise error

    def allows(self, needed: Needs, headers: Iterable[Header]) -> bool:
        """Whether `check` would pass; a refusal is not counted."""
        return self._refusal(needed, headers) is None

    def _refusal(self, needed: Needs, headers: Iterable[Header]) -> tuple[str, Denied] | None:
        headers = list(headers)
        if self._hosts and needed != "nothing" and not origins.is_for(headers, self._hosts):
            return "host", WrongHost(OTHER_HOST)
        scope = self._scope(needed)
        if scope is None:
            return None
        if scope == "admin" and origins.is_cross_site(headers, self._origins):
            return "cross_site", CrossSite(CROSS_SITE)
        if not self.closed:
            if scope == "admin" and not self._settings.open_admin:
                return "no_keys_configured", Forbidden(NO_ADMIN)
            return None
        presented = [value for name, value in headers if name == b"authorization"]
        if not presented:
            return "no_key", Unauthorized(NO_KEY)
        key = self._find(presented)
        if key is None:
            return "unknown_key", Unauthorized(UNKNOWN_KEY)
        if not key.may(scope):
            return "scope", Forbidden(f"The key {key.name!r} does not have the scope {scope}.")
        return None

    def _scope(self, needed: Needs) -> Scope | None:
        if needed == "metrics":
            wanted = self._settings.metrics
            return None if wanted == "open" or not self.closed else wanted
        return None if needed == "nothing" else needed

    async def refresh(self, *, now: bool = False) -> None:
        """Reads the key file if it has changed, or in any case; a wrong one changes nothing."""
        if not await asyncio.to_thread(self._file.changed) and not now:
            return
        try:
            ring = KeyRing(await asyncio.to_thread(configured, self._settings))
        except KeysWrong as failure:
            logger.error("%s; keeping the previous keys.", str(failure).removesuffix("."))
            self._reload_failed(True)
            return
        self._reload_failed(False)
        if ring.keys != self._ring.keys:
            self._ring = ring
            self.generation += 1
            logger.info("The keys have changed: %s.", _listed(ring.keys))

    def _find(self, presented: list[bytes]) -> Key | None:
        value = presented[0]
        if len(presented) > 1 or value[: len(SCHEME)].lower() != SCHEME:
            return None
        token = value[len(SCHEME) :].strip()
        return self._ring.find(token) if len(token) <= LONGEST_TOKEN else None


def configured(settings: AccessSettings) -> list[Key]:
    """All keys, those of the settings and those of the file. Raises KeysWrong."""
    return [*settings.keys, *(read(settings.keys_file) if settings.keys_file else [])]


def _listed(keys: Iterable[Key]) -> str:
    return ", ".join(f"{key.name} ({', '.join(sorted(key.scopes))})" for key in keys)
