"""Who may ask for what: API keys and their scopes."""

from collections.abc import Iterable

from service.errors import DSSError

Header = tuple[bytes, bytes]


class Unauthorized(DSSError):
    """No key, or one that is not known."""


class Forbidden(DSSError):
    """The key's scopes do not cover this."""


class Access:
    """Without keys everyone may do everything but what changes the server."""

    generation = 0  # grows when the keys change: what was allowed must be asked again

    def check(self, method: str, path: str, headers: Iterable[Header]) -> None:
        """Raise Unauthorized or Forbidden unless the headers' bearer may ask this."""
