"""Arrays without an owner, for compiled loops.

Numba counts the owners of an array at every slice and every call, atomically, which in a small
search took longer than the arithmetic. So loops are compiled to count none (see `jit`), and get
arrays that have none: whoever borrows one keeps what it came from until it is done.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.extending import intrinsic
from numba.np import arrayobj as untyped_arrayobj
from numpy.typing import NDArray

from service.engine.kernels.jit import inlined

arrayobj: Any = untyped_arrayobj
cgutils: Any = untyped_cgutils
LINE = 64  # bytes of the caches


@intrinsic
def _array_at(typing: Any, address: Any, n: Any, number: Any) -> Any:  # noqa: ANN401
    """The array of n such numbers at an address. numba's `carray` has owners counted."""
    del typing, address, n
    made: Any = types.Array(number.dtype, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        del signature
        address, n, _ = arguments
        array = context.make_array(made)(context, builder)
        kind = context.get_data_type(made.dtype)
        size = context.get_constant(types.intp, context.get_abi_sizeof(kind))
        data = builder.inttoptr(address, kind.as_pointer())
        arrayobj.populate_array(array, data, [n], [size], size, meminfo=None)
        return array._getvalue()

    return made(types.int64, types.int64, number), generate


@intrinsic
def _borrowed(typing: Any, array: Any) -> Any:  # noqa: ANN401
    """The same array without its owner; it may be written to, if the owner lets it."""
    del typing
    made = array.copy(readonly=False)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        del signature
        given = context.make_array(array)(context, builder, arguments[0])
        kept = context.make_array(made)(context, builder)
        shape = cgutils.unpack_tuple(builder, given.shape)
        strides = cgutils.unpack_tuple(builder, given.strides)
        arrayobj.populate_array(kept, given.data, shape, strides, given.itemsize, meminfo=None)
        return kept._getvalue()

    return made(array), generate


@intrinsic
def _stack_words(typing: Any, n: Any) -> Any:  # noqa: ANN401
    """The address of n words, a constant, on the stack of the function that calls it."""
    del typing
    if not isinstance(n, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        del context, signature, arguments
        word = ir.IntType(64)
        with builder.goto_entry_block():
            space = builder.alloca(ir.ArrayType(word, n.literal_value))
            space.align = LINE
        return builder.ptrtoint(space, word)

    return types.int64(n), generate


# numba replaces these by the code above; to mypy they are functions of any arguments.
array_at: Any = _array_at
borrowed: Any = _borrowed
stack_words: Any = _stack_words


@inlined
def words(space: NDArray[np.float64], begin: int, n: int) -> NDArray[np.int64]:
    """A part of borrowed space, as whole numbers."""
    return space[begin : begin + n].view(np.int64)
