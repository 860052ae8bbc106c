"""Reads top-k answers: .npy records, or JSON if class labels were asked for.

Shapes: B rows, k answers.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from service import npy
from service.client.errors import AnswerMalformed
from service.client.http1 import Reply

JSON, NPY = "application/json", "application/x-npy"
ScalarT = TypeVar("ScalarT", bound=np.generic)
PREAMBLE = 10  # bytes before the text of a .npy header: magic, version, length


@dataclass(frozen=True, eq=False, slots=True)
class Answer:
    """The most probable classes of each row, and the model and version that answered."""

    classes: NDArray[np.int64]  # [B,k], the most probable first
    log_probs: NDArray[np.float32]  # [B,k]
    experts: NDArray[np.int64]  # [B], the expert that the gate chose
    gates: NDArray[np.float32]  # [B], the gate's value for that expert
    labels: list[list[str]] | None  # [B,k], if asked for and the model has them
    model: str
    version: int
    # If exact, recall or rescore was asked for, or the server promises a recall by itself:
    searched: NDArray[np.int64] | None = None  # [B] experts; 0 of exact rows
    rungs: NDArray[np.str_] | None = None  # [B], sparse, escalated or exact
    promise: str | None = None  # of a recall: kept or withdrawn


def read(reply: Reply, rows: int, *, named: bool) -> Answer:
    """The answer to so many rows; `named`: as JSON, with class labels."""
    wanted, found = JSON if named else NPY, reply.header(b"content-type")
    if found.partition(";")[0] != wanted:
        raise AnswerMalformed(f"The answer is {found or 'nothing known'!r:.80}, not {wanted}.")
    try:
        answer = _read_json(reply.body) if named else _read_npy(reply)
    except (KeyError, TypeError, ValueError) as error:  # ValueError: also orjson's
        raise AnswerMalformed(f"The answer is not what {wanted} should hold: {error}.") from error
    if len(answer.classes) != rows:
        raise AnswerMalformed(f"{rows} rows were asked; {len(answer.classes)} are answered.")
    return answer


def _read_npy(reply: Reply) -> Answer:
    body = reply.body
    start = PREAMBLE + int.from_bytes(body[8:PREAMBLE], "little")
    dtype, rows = _layout(body[:start])
    if len(body) != start + rows * dtype.itemsize:
        raise ValueError("its length is wrong")
    found = np.ndarray(rows, dtype, body, start)
    plain = "rungs" not in (dtype.names or ())
    return Answer(  # copies: aligned, and writeable by the caller
        found["classes"].copy(),
        found["log_probs"].copy(),
        found["experts"].copy(),
        found["gates"].copy(),
        None,
        reply.headers[b"dss-model"].decode(),
        int(reply.headers[b"dss-model-version"]),
        None if plain else found["searched"].copy(),
        None if plain else found["rungs"].copy(),
        reply.header(b"dss-promise") or None,
    )


@lru_cache(maxsize=256)
def _layout(header: bytes) -> tuple[np.dtype[np.void], int]:
    """The dtype of a row's record, and the number of records."""
    stream = io.BytesIO(header)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("its .npy version is not known")
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    known = [] if dtype.names is None else [npy.answer_record(_k(dtype), p) for p in (True, False)]
    if len(shape) != 1 or dtype not in known:
        raise ValueError("its records are not known")
    return dtype, shape[0]


def _k(dtype: np.dtype[Any]) -> int:
    return int(dtype["classes"].shape[0]) if dtype["classes"].shape else 0


def _read_json(body: bytes) -> Answer:
    document = orjson.loads(body)
    answer = Answer(
        np.array(document["classes"], np.int64),
        np.array(document["log_probs"], np.float32),
        np.array(document["experts"], np.int64),
        np.array(document["gates"], np.float32),
        document.get("labels"),
        document["model"],
        document["version"],
        np.array(document["searched"], np.int64) if "searched" in document else None,
        np.array(document["rungs"], np.str_) if "rungs" in document else None,
        document.get("promise"),
    )
    rows = answer.classes.shape[:1]
    shapes = answer.log_probs.shape, answer.experts.shape, answer.gates.shape
    how = [found.shape for found in (answer.searched, answer.rungs) if found is not None]
    fits = shapes == (answer.classes.shape, rows, rows) and how in ([], [rows, rows])
    if answer.classes.ndim != 2 or not fits:
        raise ValueError("its arrays do not fit together")
    return answer


def joined(parts: Sequence[Answer]) -> Answer:
    """One answer from the answers to its parts."""
    labels = [part.labels for part in parts if part.labels is not None]
    return Answer(
        np.concatenate([part.classes for part in parts]),
        np.concatenate([part.log_probs for part in parts]),
        np.concatenate([part.experts for part in parts]),
        np.concatenate([part.gates for part in parts]),
        [row for part in labels for row in part] if labels else None,
        parts[0].model,
        parts[0].version,
        _joined([part.searched for part in parts]),
        _joined([part.rungs for part in parts]),
        _joined_promise([part.promise for part in parts]),
    )


def _joined(parts: Sequence[NDArray[ScalarT] | None]) -> NDArray[ScalarT] | None:
    found = [part for part in parts if part is not None]
    return np.concatenate(found) if len(found) == len(parts) else None


def _joined_promise(parts: Sequence[str | None]) -> str | None:
    """A promise that is withdrawn for one part is not kept for the whole."""
    return "withdrawn" if "withdrawn" in parts else parts[0]
