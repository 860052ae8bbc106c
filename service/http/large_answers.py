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

NUMBERS_AT_ONCE = 4096  # take a fraction of a millisecond

Encoded = Generator[None, None, bytes]


def encode_json(source: Source, answer: Answered) -> Encoded:
    head = orjson.dumps({"model": source.model, "version": source.version})
    parts = [head[:-1], b',"classes":']
    parts.append((yield from json_list(answer.classes)))
    parts.append(b',"log_probs":')
    parts.append((yield from json_list(answer.log_probs)))
    if source.labels is not None:
        parts.append(b',"labels":')
        parts.append((yield from json_list(answer.classes, source.labels)))
    for name, values in (("experts", answer.experts), ("gates", answer.gates)):
        parts.append(b',"%b":' % name.encode())
        parts.append((yield from json_list(values)))
    parts.append(b"}")
    return b"".join(parts)


def json_list(values: NDArray[Any], labels: NDArray[np.object_] | None = None) -> Encoded:
    """An array as a JSON list; with labels, those of its classes."""
    parts = []
    for rows in _slices(values):
        part: Any = values[rows]
        part = np.ascontiguousarray(part) if labels is None else labels[part].tolist()
        parts.append(orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1])
        yield
    return b"[" + b",".join(parts) + b"]"


def encode_npy(source: Source, answer: Answered) -> Encoded:
    del source
    n_rows, k = answer.classes.shape
    parts = [codecs.npy_header(n_rows, k)]
    for rows in _slices(answer.classes):
        records = np.empty(len(answer.experts[rows]), npy.answer_record(k))
        records["classes"] = answer.classes[rows]
        records["log_probs"] = answer.log_probs[rows]
        records["experts"] = answer.experts[rows]
        records["gates"] = answer.gates[rows]
        parts.append(records.tobytes())
        yield
    return b"".join(parts)


def _slices(values: NDArray[Any]) -> list[slice]:
    together = max(1, NUMBERS_AT_ONCE * len(values) // max(1, values.size))
    return [slice(first, first + together) for first in range(0, len(values), together)]


ENCODERS: Mapping[str, Callable[[Source, Answered], Encoded]] = {
    codecs.JSON: encode_json,
    codecs.NPY: encode_npy,
}
