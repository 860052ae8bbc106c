"""Query strings of what is read with GET: strict, so that a misspelt parameter is not ignored.

Parameters are described by hand, because FastAPI takes some numbers for others ("1_0"), and the
last of two parameters of a name for both.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from service.http.codecs import InvalidField, UnknownField

NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class Number:
    name: str
    description: str
    default: int
    least: int
    most: int | None = None

    @property
    def schema(self) -> dict[str, Any]:
        bounds = {"minimum": self.least} | ({} if self.most is None else {"maximum": self.most})
        return {"type": "integer", "default": self.default, **bounds}

    def read(self, text: str) -> int:
        number = int(text) if NUMBER.fullmatch(text) else -1
        if number < self.least or (self.most is not None and number > self.most):
            bounds = f"from {self.least}" + ("" if self.most is None else f" to {self.most}")
            raise InvalidField(f"{self.name!r} must be a whole number {bounds}.")
        return number


@dataclass(frozen=True)
class Text:
    name: str
    description: str
    longest: int
    default: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "default": self.default, "maxLength": self.longest}

    def read(self, text: str) -> str:
        if len(text) > self.longest:
            raise InvalidField(f"{self.name!r} must have at most {self.longest} letters.")
        return text


@dataclass(frozen=True)
class Choice:
    name: str
    description: str
    values: Sequence[str]  # the first is the default

    @property
    def default(self) -> str:
        return self.values[0]

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "default": self.default, "enum": list(self.values)}

    def read(self, text: str) -> str:
        if text not in self.values:
            raise InvalidField(f"{self.name!r} must be {' or '.join(self.values)}.")
        return text


Parameter = Number | Text | Choice


def read(query_string: bytes, *parameters: Parameter) -> list[Any]:
    """The value of each parameter, in their order."""
    known = {parameter.name: parameter for parameter in parameters}
    given: dict[str, int | str] = {}
    for name, text in parse_qsl(query_string.decode("latin-1"), keep_blank_values=True):
        if name not in known:
            names = ", ".join(known)
            raise UnknownField(f"There is no parameter {name[:40]!r} here; there are {names}.")
        if name in given:
            raise InvalidField(f"The query string has {name!r} twice.")
        given[name] = known[name].read(text)
    return [given.get(parameter.name, parameter.default) for parameter in parameters]


def described(*parameters: Parameter) -> dict[str, Any]:
    """For a route's `openapi_extra`."""
    return {
        "parameters": [
            {
                "name": parameter.name,
                "in": "query",
                "required": False,
                "description": parameter.description,
                "schema": parameter.schema,
            }
            for parameter in parameters
        ]
    }
