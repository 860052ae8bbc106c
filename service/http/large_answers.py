"""Large answers, encoded a few rows at a time: the same bytes as `codecs` and `v2` make at once.

B rows, k answers.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from service import npy
from service.http import codecs
from service.repository.model import Source
from service.topk import Answered

BYTES_AT_ONCE = 65_536  # take a fraction of a millisecond
NUMBER_BYTES = 16  # of a number in JSON, about

Parts = list[bytes]  # of an answer; they are never joined, which would take long
Encoded = Generator[None, None, Parts]


def encode_json(source: Source, answer: Answered, promise: str | None) -> Encoded:
    parts = [orjson.dumps({"model": source.model, "version": source.version})[:-1]]
    columns: dict[str, NDArray[Any]] = {"classes": answer.classes, "log_probs": answer.log_probs}
    for name, values in columns.items():
        parts.append(b',"%b":' % name.encode())
        parts += yield from json_list(values)
    if source.labels is not None:
        parts.append(b',"labels":')
        parts += yield from json_list(answer.classes, source.labels, source.label_bytes_most)
    columns = {"experts": answer.experts, "gates": answer.gates}
    for name, values in columns.items():
        parts.append(b',"%b":' % name.encode())
        parts += yield from json_list(values)
    if answer.rungs is not None and answer.searched is not None:
        parts.append(b',"searched":')
        parts += yield from json_list(answer.searched)
        parts.append(b',"rungs":')
        parts += yield from json_list(answer.rungs, codecs.RUNG_NAMES)
    if promise is not None:
        parts.append(b',"promise":' + orjson.dumps(promise))
    parts.append(b"}")
    return parts


def json_list(
    values: NDArray[Any], labels: NDArray[Any] | None = None, value_bytes: int = NUMBER_BYTES
) -> Encoded:
    """An array as a JSON list; with labels, those of its numbers."""
    parts: Parts = []
    for rows in _slices(values, value_bytes):
        part: Any = values[rows]
        part = np.ascontiguousarray(part) if labels is None else labels[part].tolist()
        encoded = orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)
        parts.append((b"," if parts else b"[") + encoded[1:-1])
        yield
    parts.append(b"]")
    return parts


def encode_npy(source: Source, answer: Answered, promise: str | None) -> Encoded:
    del source, promise
    n_rows, k = answer.classes.shape
    plain = answer.rungs is None
    parts = [codecs.npy_header(n_rows, k, plain)]
    for rows in _slices(answer.classes, npy.answer_record(k, plain).itemsize // k):
        parts.append(codecs.npy_records(answer, rows))
        yield
    return parts


def _slices(values: NDArray[Any], value_bytes: int) -> list[slice]:
    row_bytes = value_bytes * values.size // max(1, len(values))
    together = max(1, BYTES_AT_ONCE // max(1, row_bytes))
    return [slice(first, first + together) for first in range(0, len(values), together)]


ENCODERS: Mapping[str, Callable[[Source, Answered, str | None], Encoded]] = {
    codecs.JSON: encode_json,
    codecs.NPY: encode_npy,
}
