"""API keys. What is kept of a key is its hash; logs and metrics know it by its name.

A key file is TOML. Each entry names a key, holds it or its SHA-256, and says what it may do:

    [[keys]]
    name = "prometheus"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    scopes = ["query"]
"""

import re
import secrets
import tomllib
from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from service.errors import DSSError

Scope = Literal["query", "admin"]
# What may stand after "Bearer" (RFC 6750), and not so short that it could be guessed.
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,256}={0,2}")
LONGEST_TOKEN = 258
LARGEST_FILE = 2**20
PREFIX = "dss_"  # lets a scanner find a key that leaked


class KeysWrong(DSSError):
    """The keys cannot be used as they are written."""


class Key(BaseModel):
    """`key` may be given instead of `sha256`; it is hashed at once and forgotten."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    scopes: Annotated[frozenset[Scope], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _hash(cls, given: Any) -> Any:  # noqa: ANN401
        if not isinstance(given, dict) or "key" not in given:
            return given
        rest = {name: value for name, value in given.items() if name != "key"}
        if "sha256" in rest:
            raise ValueError("either key or sha256 may be given")
        if not isinstance(given["key"], str) or not TOKEN.fullmatch(given["key"]):
            raise ValueError("key must be 16 to 256 of the letters A-Z a-z 0-9 . _ ~ + / -")
        return {**rest, "sha256": sha256(given["key"].encode()).hexdigest()}

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    keys: list[Key]


class KeyRing:
    def __init__(self, keys: Iterable[Key]) -> None:
        self.keys = tuple(keys)
        for part in ("name", "sha256"):
            if len({getattr(key, part) for key in self.keys}) < len(self.keys):
                raise KeysWrong(f"Two keys have the same {part}.")
        self._digests = [(bytes.fromhex(key.sha256), key) for key in self.keys]

    def find(self, token: bytes) -> Key | None:
        """In a time that says nothing about the keys: all are compared, and only hashes are."""
        presented = sha256(token).digest()
        found = None
        for digest, key in self._digests:
            if compare_digest(digest, presented):
                found = key
        return found


def read(path: Path) -> list[Key]:
    """The keys of a file. One without any key would open the server, so it is refused."""
    try:
        with path.open("rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
    except OSError as error:
        raise KeysWrong(f"The key file {path} cannot be read: {error.strerror}.") from error
    if len(content) > LARGEST_FILE:
        raise KeysWrong(f"The key file {path} is larger than {LARGEST_FILE} bytes.")
    try:
        keys = _File.model_validate(tomllib.loads(content.decode())).keys
    except ValidationError as error:
        raise KeysWrong(f"The key file {path} is wrong: {_place(error)}.") from None
    except ValueError as error:
        # tomllib may quote what it stumbled over, which may be a key: only the place is told.
        place = re.search(r"\(at .*\)$", str(error))
        raise KeysWrong(f"The key file {path} is not TOML{_after(place)}.") from None
    if not keys:
        raise KeysWrong(f"The key file {path} holds no key.")
    return keys


def new() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def make(name: str, token: str, scopes: Iterable[str]) -> Key:
    try:
        return Key.model_validate({"name": name, "key": token, "scopes": list(scopes)})
    except ValidationError as error:
        raise KeysWrong(f"This cannot be a key: {_place(error)}.") from None


def entry(name: str, token: str, scopes: Iterable[str]) -> str:
    """What to write into a key file for this token, without the token."""
    key = make(name, token, scopes)
    listed = ", ".join(f'"{scope}"' for scope in sorted(key.scopes))
    return f'[[keys]]\nname = "{key.name}"\nsha256 = "{key.sha256}"\nscopes = [{listed}]\n'


def _place(error: ValidationError) -> str:
    first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg'].removeprefix('Value error, ')}"


def _after(place: "re.Match[str] | None") -> str:
    return f" {place.group()}" if place else ""
