"""Large bodies of the native protocol, decoded a piece at a time: the same as `codecs` reads.

B rows, D hidden.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.http import codecs, fields, json_rows
from service.http.codecs import Bounds, Query
from service.http.fields import InvalidField

NUMBERS_AT_ONCE = 65_536

Decoded = Generator[None, None, Query]


def decode_json(body: bytes, query_string: bytes, bounds: Bounds) -> Decoded:
    cut = json_rows.cut_inputs(body)
    bounds.check_lists(cut.document)
    document = codecs.read_document(cut.document, query_string)
    if document["inputs"] != []:
        raise InvalidField("'inputs' must be a list of rows, and the only list in the body.")
    options = fields.of_object(document)
    hidden = yield from json_rows.parse_rows(body, cut.begin, cut.end, bounds)
    return Query(hidden, *options)


def decode_npy(body: bytes, query_string: bytes, bounds: Bounds) -> Decoded:
    values, options = codecs.read_npy(body, query_string, bounds)
    hidden = yield from float32(values)
    return Query(hidden, *options)


def float32(values: NDArray[np.floating[Any]]) -> Generator[None, None, NDArray[np.float32]]:
    if values.dtype == codecs.FLOAT32:
        return codecs.float32(values)
    hidden = np.empty(values.shape, np.float32)  # [B,D]
    together = max(1, NUMBERS_AT_ONCE // max(1, values.shape[1]))
    for first in range(0, len(values), together):
        part = slice(first, first + together)
        hidden[part] = codecs.float32(values[part], first)
        yield
    return hidden


DECODERS: Mapping[str, Callable[[bytes, bytes, Bounds], Decoded]] = {
    codecs.JSON: decode_json,
    codecs.NPY: decode_npy,
}
