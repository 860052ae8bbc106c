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

from pydantic import BaseModel, ConfigDict, ValidationError

from service.errors import DSSError
from service.settings import Key

LONGEST_TOKEN = 258
LARGEST_FILE = 2**20
PREFIX = "dss_"  # lets a scanner find a key that leaked


class KeysWrong(DSSError):
    """The keys cannot be used as they are written."""


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
