"""The small values of a top-k request: k, experts, and what the answer must be (its mode).

They come in a JSON body, in a query string beside a .npy body, or as parameters of protocol v2.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from service.errors import ModesConflict, QueryError, RecallOutOfRange
from service.topk import SPARSE, Mode

MODES = ("exact", "recall", "rescore")
NAMES = ("k", "experts", *MODES)
SHORT = 64  # of a query string whose meaning is worth keeping
INTEGER = re.compile(r"-?[0-9]{1,18}")
NUMBER = re.compile(r"-?([0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18})([eE][-+]?[0-9]{1,3})?")
SWITCH = {"true": True, "false": False}


class UnknownField(QueryError):
    pass


class MissingField(QueryError):
    pass


class InvalidField(QueryError):
    """k, experts, a mode or inputs is not of the right kind."""


class Options(NamedTuple):
    k: int | None  # None: as many as is usual for the model
    experts: int
    mode: Mode | None  # None: neither experts nor a mode was named, so that the server may choose


def of_object(given: Mapping[str, Any]) -> Options:
    """The options in a JSON object; what else is there is not looked at."""
    k = count("k", given["k"]) if "k" in given else None
    experts = count("experts", given["experts"]) if "experts" in given else None
    if "exact" in given or "recall" in given or "rescore" in given:
        return Options(k, 1 if experts is None else experts, _mode(given, experts))
    return Options(k, 1, None) if experts is None else Options(k, experts, SPARSE)


def of_query_string(query_string: bytes) -> Options:
    return _of_short(query_string) if len(query_string) <= SHORT else _of_text(query_string)


def _of_text(query_string: bytes) -> Options:
    given: dict[str, Any] = {}
    for name, text in parameters(query_string):
        if name not in NAMES:
            known = f"{', '.join(NAMES[:-1])} and {NAMES[-1]}"
            raise UnknownField(f"The query string may hold {known}; it has {quoted(name)}.")
        if name in given:
            raise InvalidField(f"The query string has {name!r} twice.")
        given[name] = _value(name, text)
    return of_object(given)


_of_short = lru_cache(maxsize=256)(_of_text)


def _value(name: str, text: str) -> object:
    """What a parameter's text would be in JSON."""
    if name == "recall":
        if not NUMBER.fullmatch(text):
            raise InvalidField("'recall' must be a number.")
        return float(text)
    if name in MODES:
        if text not in SWITCH:
            raise InvalidField(f"{name!r} must be true or false.")
        return SWITCH[text]
    if not INTEGER.fullmatch(text):
        raise InvalidField(f"{name!r} must be an integer.")
    return int(text)


def _mode(given: Mapping[str, Any], experts: int | None) -> Mode:
    exact, rescore = _switch("exact", given), _switch("rescore", given)
    recall = _share("recall", given["recall"]) if "recall" in given else None
    if exact + (recall is not None) + rescore > 1:
        raise ModesConflict("Only one of 'exact', 'recall' and 'rescore' may be asked for.")
    if (exact or recall is not None) and experts not in (None, 1):
        raise ModesConflict(
            "'experts' goes with neither 'exact' nor 'recall', which say by themselves how much is"
            " searched."
        )
    return Mode(exact, recall, rescore) if exact or rescore or recall is not None else SPARSE


def _switch(name: str, given: Mapping[str, Any]) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise InvalidField(f"{name!r} must be true or false, not {kind(value)}.")
    return value


def _share(name: str, value: object) -> float:
    # `type`, because true is an int to isinstance.
    if type(value) is not float and type(value) is not int:
        raise InvalidField(f"{name!r} must be a number, not {kind(value)}.")
    if not 0.0 < value <= 1.0:
        raise RecallOutOfRange(
            f"{name} is {float(value):g}; a share above 0 and up to 1 is expected."
        )
    return float(value)


def count(name: str, value: object) -> int:
    if type(value) is not int:
        raise InvalidField(f"{name!r} must be an integer, not {kind(value)}.")
    return value


def parameters(query_string: bytes) -> list[tuple[str, str]]:
    if not query_string:
        return []
    return parse_qsl(query_string.decode("latin-1"), keep_blank_values=True)


def kind(value: object) -> str:
    """What a JSON value is, for a sentence."""
    kinds = {
        bool: "a boolean",
        int: "a number",
        float: "a fractional number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return kinds.get(type(value), "null")


def quoted(name: str) -> str:
    """A name the client chose, short enough to be said back."""
    return repr(name if len(name) <= 40 else name[:40] + "...")
