"""Compiles Python loops into machine code; the types of their arguments."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from service.engine.kernels import cache

Function = TypeVar("Function", bound=Callable[..., Any])
Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


def compiled(
    fastmath: set[str],
    signature: object = None,
    inline: Literal["never", "always"] = "never",
    forceinline: bool = False,
    allocates: bool = False,
) -> Callable[[Function], Function]:
    """Compiles a function with numba, without the GIL; machine code is cached on disk if possible.

    A function with a signature is compiled when its module is imported, never by a request.
    Only one that allocates, or returns an array, counts the owners of arrays: it took most of the
    time of a small answer. The others' arrays are kept by whoever calls them.
    """

    def compile_it(function: Function) -> Function:
        kept = cache.folder() is not None
        options: dict[str, Any] = {
            "nogil": True,
            "cache": kept,
            "fastmath": fastmath,
            "inline": inline,
            "forceinline": forceinline,
            "_nrt": allocates,  # an option of numba's that its annotations leave out
        }
        with cache.in_use():
            made = njit(signature, **options)(function)
        return cast(Function, made)

    return compile_it


def entry_point(function: Function) -> Function:
    """The machine code of a function with one signature, for Python to call without numba's look at
    the types of its arguments, which the caller guarantees."""
    dispatcher: Any = function
    return cast(Function, dispatcher.overloads[dispatcher.signatures[0]].entry_point)


# A product and a sum may be fused, but no sum is reordered: vectors and single numbers agree.
ORDERED = {"contract", "nsz"}
ordered = compiled(ORDERED)
allocating = compiled(ORDERED, allocates=True)
# Copied into its caller: a call would pass a layer's record again, a hundred words for each expert.
inlined = compiled(ORDERED, inline="always")
# The same, but by LLVM, after each was compiled by itself.
forced = compiled(ORDERED, forceinline=True)
# Sums may be reordered: only for what is computed by the same loop in every case.
REORDERED = {*ORDERED, "reassoc"}
reordered = compiled(REORDERED)


def given(scalar: types.Type, dimensions: int, layout: Literal["C", "A"] = "C") -> types.Type:
    """An array that is only read, so it may be a view of a mapped file or of a request body."""
    return types.Array(scalar, dimensions, layout, readonly=True)


ROWS, FLOATS, INTEGERS = given(types.float32, 2), given(types.float32, 1), given(types.int64, 1)
SECONDS, COUNTS = types.float64[::1], types.int64[::1]
INTEGER_TABLE, FLOAT_TABLE = types.int64[:, ::1], types.float32[:, ::1]
