"""Checks every value of a manifest, known or not, before it is given a meaning.

Its texts are shown by servers and commands, so one that cannot be encoded, or that controls a
terminal, would break what shows it.
"""

import math
import unicodedata

from service.bundle.format import MANIFEST
from service.errors import ManifestMalformed

LONGEST_TEXT = 1000  # characters
LARGEST_INTEGER = 2**63 - 1
UNPRINTABLE = {"Cc": "a control character", "Cs": "half a character (a lone surrogate)"}
SHOWN_CHARACTERS = 60  # of a text, in a refusal


def check_density(content: bytes) -> None:
    """Refuses what would unfold when it is parsed: an empty list takes three bytes in a file, and
    sixty in memory. The entry of a file has one object and four texts in 100 bytes or more."""
    containers = content.count(b"[") + content.count(b"{")
    if containers > 64 + len(content) // 64 or content.count(b'"') > 512 + len(content) // 8:
        raise ManifestMalformed(f"{MANIFEST} has too many values for its size.")


def check_values(fields: object) -> None:
    """Keys and values at any depth; not recursive, because JSON may be deeply nested."""
    unchecked: list[object] = [fields]
    while unchecked:
        value = unchecked.pop()
        if isinstance(value, dict):
            unchecked += [*value, *value.values()]
        elif isinstance(value, list):
            unchecked += value
        elif isinstance(value, str):
            _check_text(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ManifestMalformed(f"{MANIFEST} holds a number that is not finite.")
        elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            raise ManifestMalformed(f"{MANIFEST} holds a number of more than 64 bits.")


def _check_text(text: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise ManifestMalformed(
            f"{MANIFEST} holds a text of {len(text)} characters; {LONGEST_TEXT} are possible."
        )
    if text.isascii() and text.isprintable():
        return
    for character in text:
        problem = UNPRINTABLE.get(unicodedata.category(character))
        if problem is not None:
            shown = ascii(text[:SHOWN_CHARACTERS])
            raise ManifestMalformed(f"{MANIFEST} holds {problem} in the text {shown}.")
