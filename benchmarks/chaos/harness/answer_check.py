"""Whether an answer to a request is what the engine says.

An answer must be that of the version it names, whole: classes, log-probabilities, experts and
gates. An answer that was right once is right when the same bytes come again, which makes checking
all of them cheap. No engine is imported here, so that a load generator starts quickly.

B rows, k answers.
"""

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

END = b"\r\n\r\n"
VERSION = re.compile(rb"\r\ndss-model-version: *([0-9]+)", re.IGNORECASE)
JSON_LENGTH = re.compile(rb"\r\ninference-header-content-length: *([0-9]+)", re.IGNORECASE)
TOLERANCE = 1e-5
BODIES_KEPT = 8  # right ones of one question and version


class Reply(NamedTuple):
    """What the engine says."""

    version: int
    classes: NDArray[np.int64]  # [B,k]
    log_probs: NDArray[np.float64]  # [B,k]
    experts: NDArray[np.int64]  # [B]
    gates: NDArray[np.float64]  # [B]


class Unreadable(Exception):
    """An answer with status 200 is not one of this API."""


UNREADABLE = (ValueError, KeyError, TypeError, IndexError, AttributeError, Unreadable)
Arrays = Mapping[str, NDArray[np.float64]]
NAMES = ("classes", "log_probs", "experts", "gates")


@dataclass(frozen=True)
class Question:
    kind: str
    request: bytes
    expected: Mapping[int, Sequence[Reply]]  # what a version may answer, by version


@dataclass
class Checker:
    """Knows the right answers to some questions."""

    questions: Sequence[Question]
    _right: set[tuple[int, bytes, bytes]] = field(default_factory=set)
    _kept: dict[int, int] = field(default_factory=dict)

    def why_wrong(self, number: int, answer: bytes) -> str | None:
        """None if the answer to a question is right; else what is wrong with it."""
        head_ends = answer.find(END)
        body = answer[head_ends + len(END) :]
        named = VERSION.search(answer, 0, head_ends)
        key = (number, named[1] if named else b"", body)
        if key in self._right:
            return None
        question = self.questions[number]
        try:
            version, found = read_arrays(question.kind, answer[:head_ends], body)
        except UNREADABLE as error:
            return f"it cannot be read ({error!r:.80})"
        expected = question.expected.get(version)
        if not expected:
            return f"it names version {version}, which does not exist"
        differences = [differs(found, reply) for reply in expected]
        difference = None if None in differences else differences[0]
        kept = self._kept.get(number, 0)
        if difference is None and kept < BODIES_KEPT * len(question.expected):
            self._kept[number] = kept + 1
            self._right.add(key)
        return difference


def differs(found: Arrays, expected: Reply, names: Sequence[str] = NAMES) -> str | None:
    """Where an answer is not the engine's; rounding may differ when rows are joined."""
    for name in names:
        if name not in found:
            return f"it has no {name}"
        wanted, given = getattr(expected, name), found[name]
        same = given.shape == wanted.shape
        if same and name in ("classes", "experts"):
            same = np.array_equal(given, wanted)
        elif same:
            # JSON has no infinities: they arrive as null, which is read as a NaN.
            finite = np.isfinite(wanted)
            same = np.array_equal(np.isfinite(given), finite) and np.allclose(
                given[finite], wanted[finite], rtol=TOLERANCE, atol=TOLERANCE
            )
        if not same:
            return f"its {name} are not those of version {expected.version}"
    return None


# --- answers ---------------------------------------------------------------------------------


def read_arrays(kind: str, head: bytes, body: bytes) -> tuple[int, Arrays]:
    """The version that answers, and its answer."""
    if kind == "json":
        found = json.loads(body)
        version = int(found["version"])
    elif kind == "npy":
        found = np.load(io.BytesIO(body), allow_pickle=False)
        named = VERSION.search(head)
        version = int(named[1]) if named else 0
    else:
        version, found = _read_v2(head, body)
    held = found.dtype.names if kind == "npy" else found
    return version, {name: np.asarray(found[name], np.float64) for name in NAMES if name in held}


def _read_v2(head: bytes, body: bytes) -> tuple[int, dict[str, Any]]:
    length = JSON_LENGTH.search(head)
    ends = int(length[1]) if length else len(body)
    document = json.loads(body[:ends])
    found = {}
    for tensor in document["outputs"]:
        if "data" in tensor:
            values = np.asarray(tensor["data"], np.float64)
        else:
            dtype = np.dtype({"INT64": "<i8", "FP32": "<f4"}[tensor["datatype"]])
            size = tensor["parameters"]["binary_data_size"]
            values = np.frombuffer(body[ends : ends + size], dtype)
            ends += size
        found[tensor["name"]] = values.reshape(tensor["shape"])
    if length and ends != len(body):
        raise Unreadable("Bytes follow the last tensor.")
    return int(document["model_version"]), found
