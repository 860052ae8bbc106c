"""The .npy format of requests and answers; reading trusts nothing that a client sent.

A request must hold two-dimensional floats and nothing else. The header is only ever compared with
the bytes that are there; no array is allocated from what it claims, and nothing is unpickled.
"""

import ast
import io
import struct
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import DSSError, EmptyBatch, Kind, QueryError, WrongWidth

MAGIC = b"\x93NUMPY"
# Version of the format -> how the header's length is stored.
HEADER_LENGTH = {(1, 0): "<H", (2, 0): "<I", (3, 0): "<I"}
MAX_HEADER_BYTES = 1024
DTYPES = {order + kind for order in "<>" for kind in ("f2", "f4", "f8")}


class MalformedNpy(DSSError):
    """The bytes are not a .npy file, or its header contradicts them."""

    kind = Kind.BAD_REQUEST


class WrongDtype(QueryError):
    pass


class WrongLayout(QueryError):
    """The array is not two-dimensional in C order."""


def read(body: bytes) -> NDArray[np.floating[Any]]:
    """The array in `body`, [B,D], sharing its memory."""
    if body[6:8] == b"\x01\x00":  # what numpy writes if it can
        header_ends = 10 + int.from_bytes(body[8:10], "little")
        dtype, shape, start = _known_layout(body[:header_ends], len(body))
    else:
        dtype, shape, start = _layout(body[: 12 + MAX_HEADER_BYTES], len(body))
    return np.ndarray(shape, dtype, body, start)


def is_float32(body: bytes) -> bool:
    """Whether the array in `body` needs no conversion."""
    return b"'<f4'" in body[:MAX_HEADER_BYTES]


def write(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def header_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The bytes before the data in a .npy file."""
    buffer = io.BytesIO()
    claims = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(buffer, claims)
    return buffer.getvalue()


@lru_cache(maxsize=64)
def answer_record(k: int, plain: bool = True) -> np.dtype[np.void]:
    """One row of a .npy answer: np.load(file)["classes"] is [B,k], and so on. One that is not
    plain also says how the row was answered."""
    fields = [
        ("classes", "<i8", (k,)),
        ("log_probs", "<f4", (k,)),
        ("experts", "<i8", ()),
        ("gates", "<f4", ()),
    ]
    if not plain:
        fields += [("searched", "<i8", ()), ("rungs", "<U9", ())]
    return np.dtype(fields)


def _layout(head: bytes, size: int) -> tuple[np.dtype[Any], tuple[int, int], int]:
    """Type and shape of the array in a file of `size` bytes, and where its data begins."""
    header, start = _header(head)
    if set(header) != {"descr", "fortran_order", "shape"}:
        raise MalformedNpy("The .npy header must hold descr, fortran_order and shape.")
    descr, fortran_order, shape = header["descr"], header["fortran_order"], header["shape"]
    if not isinstance(descr, str) or descr not in DTYPES:
        raise WrongDtype(
            "The .npy array must be float32, float16 or float64; object, structured and other"
            " types are refused."
        )
    if not isinstance(fortran_order, bool):
        raise MalformedNpy("fortran_order in the .npy header must be True or False.")
    # `type`, because True is an int to isinstance.
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise MalformedNpy("The shape in the .npy header must be a tuple of sizes.")
    if len(shape) != 2:
        raise WrongLayout(f"The .npy array has {len(shape)} dimensions; 2 are expected.")
    if fortran_order:
        raise WrongLayout("The .npy array is in Fortran order; C order is expected.")
    dtype = np.dtype(descr)
    claimed, present = shape[0] * shape[1] * dtype.itemsize, size - start
    if claimed != present:
        raise MalformedNpy(
            f"The .npy header announces {_count(claimed)} bytes of data; {present} follow it."
        )
    if not shape[0]:
        raise EmptyBatch("The .npy array holds no row.")
    if not shape[1]:
        raise WrongWidth("The rows of the .npy array are empty.")
    return dtype, shape, start


_known_layout = lru_cache(maxsize=256)(_layout)  # clients repeat the same few headers


def _header(body: bytes) -> tuple[dict[Any, Any], int]:
    """The header's dictionary and where the data begins."""
    if not body.startswith(MAGIC) or len(body) < len(MAGIC) + 2:
        raise MalformedNpy("The body is not a .npy file.")
    version = (body[6], body[7])
    if version not in HEADER_LENGTH:
        raise MalformedNpy(f"Version {version[0]}.{version[1]} of the .npy format is not known.")
    length_format = HEADER_LENGTH[version]
    first = 8 + struct.calcsize(length_format)
    if len(body) < first:
        raise MalformedNpy("The .npy header is cut short.")
    (length,) = struct.unpack_from(length_format, body, 8)
    if length > MAX_HEADER_BYTES:
        raise MalformedNpy(f"The .npy header is longer than {MAX_HEADER_BYTES} bytes.")
    text = body[first : first + length]
    if len(text) < length:
        raise MalformedNpy("The .npy header is cut short.")
    try:
        # A backslash is in no header of a float array, and could make the parser warn.
        header = None if b"\\" in text else ast.literal_eval(text.decode("ascii").strip())
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise MalformedNpy("The .npy header is not a dictionary.")
    return header, first + length


def _count(number: int) -> str:
    return str(number) if number < 10**18 else "far too many"
