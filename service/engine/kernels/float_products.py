"""Products of rows with matrices, in compiled loops.

A matrix of V classes is stored by column, [D,V]: W h is then a sum over D of scaled columns, added
in the same order for one row and for many. So a row's scores do not depend on its batch, bit for
bit, and sums need not be gathered from the lanes of a vector. Numbers are float32, or float16 that
are widened as they are read (their bits, as uint16).

Of whole numbers no order of adding changes a sum, so int8 matrices are stored by row, [V,D].

B rows, D hidden, V classes of an expert, T rows that are scored together.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from service.bundle.quantisation import ACTIVATION_STEPS
from service.engine.kernels.jit import Floats, Integers, ordered, reordered

cgutils: Any = untyped_cgutils

ONE_ROW_TILE = 4096  # columns whose sums stay in the first cache
TILE = 1024  # columns of a matrix that mostly stay in the second cache while many rows pass
INTEGER_TILE = 64  # rows of an int8 matrix that stay in the first cache while many rows pass

HAS_AVX2 = bool(get_host_cpu_features().get("avx2", False))
ZERO = np.float32(0)
TINY = np.finfo(np.float32).tiny
STEPS = np.float32(ACTIVATION_STEPS)
ROUNDER = np.float32(12582912)  # adding and subtracting it rounds to a whole number


@intrinsic
def _wide(typing: Any, number: types.Type) -> Any:  # noqa: ANN401
    """A stored number as float32; of float16 one instruction widens eight."""
    del typing

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        del context, signature
        if number == types.float32:
            return arguments[0]
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(number), generate


@intrinsic
def _pointer(typing: Any, address: types.Type) -> Any:  # noqa: ANN401
    """To what is at an address."""
    del typing

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        del context, signature
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@intrinsic
def _prefetch(typing: Any, array: types.Type, place: types.Type) -> Any:  # noqa: ANN401
    """Have a place of an array brought into the caches, without waiting for it."""
    del typing

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [address, i32(0), i32(3), i32(1)])  # to read, soon, data
        return context.get_dummy_value()

    return types.void(array, place), generate


@intrinsic
def _float_of_bits(typing: Any, bits: types.Type) -> Any:  # noqa: ANN401
    del typing

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        del context, signature
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(bits), generate


wide: Any = _wide
float_of_bits: Any = _float_of_bits
prefetch: Any = _prefetch
pointer: Any = _pointer


@ordered
def add_products(h: Floats, matrix: Floats, first: int, stride: int, y: Floats) -> None:
    """y[v] += sum over d of h[d] matrix[first + d stride + v].

    Memory is read from eight places at once that are far from each other, an eighth of the matrix:
    each is then one long stream, which processors fetch ahead. So d goes 0, D/8, 2 D/8, ..., then
    1, D/8 + 1, and so on, and what is left of D comes last.
    """
    width, eighth = y.shape[0], h.shape[0] // 8
    jump = eighth * stride
    for d in range(eighth):
        h0, h1, h2, h3 = h[d], h[eighth + d], h[2 * eighth + d], h[3 * eighth + d]
        h4, h5, h6 = h[4 * eighth + d], h[5 * eighth + d], h[6 * eighth + d]
        h7 = h[7 * eighth + d]
        at = first + d * stride
        w0, w1 = matrix[at : at + width], matrix[at + jump : at + jump + width]
        at += 2 * jump
        w2, w3 = matrix[at : at + width], matrix[at + jump : at + jump + width]
        at += 2 * jump
        w4, w5 = matrix[at : at + width], matrix[at + jump : at + jump + width]
        at += 2 * jump
        w6, w7 = matrix[at : at + width], matrix[at + jump : at + jump + width]
        for v in range(width):
            part = ((y[v] + h0 * wide(w0[v])) + h1 * wide(w1[v])) + h2 * wide(w2[v])
            part = ((part + h3 * wide(w3[v])) + h4 * wide(w4[v])) + h5 * wide(w5[v])
            y[v] = (part + h6 * wide(w6[v])) + h7 * wide(w7[v])
    for d in range(8 * eighth, h.shape[0]):
        at = first + d * stride
        h0, w0 = h[d], matrix[at : at + width]
        for v in range(width):
            y[v] = y[v] + h0 * wide(w0[v])


@ordered
def add_products_of_two(
    g: Floats, h: Floats, matrix: Floats, first: int, stride: int, x: Floats, y: Floats
) -> None:
    """`add_products` of g into x and of h into y, in the same order: the matrix is read once."""
    width, eighth = y.shape[0], h.shape[0] // 8
    jump = eighth * stride
    for d in range(eighth):
        for half in range(2):  # eight columns of two rows would need too many registers
            c = 4 * half * eighth + d
            at = first + c * stride
            g0, g1, g2, g3 = g[c], g[c + eighth], g[c + 2 * eighth], g[c + 3 * eighth]
            h0, h1, h2, h3 = h[c], h[c + eighth], h[c + 2 * eighth], h[c + 3 * eighth]
            w0, w1 = matrix[at : at + width], matrix[at + jump : at + jump + width]
            at += 2 * jump
            w2, w3 = matrix[at : at + width], matrix[at + jump : at + jump + width]
            for v in range(width):
                u0, u1, u2, u3 = wide(w0[v]), wide(w1[v]), wide(w2[v]), wide(w3[v])
                x[v] = (((x[v] + g0 * u0) + g1 * u1) + g2 * u2) + g3 * u3
                y[v] = (((y[v] + h0 * u0) + h1 * u1) + h2 * u2) + h3 * u3
    for d in range(8 * eighth, h.shape[0]):
        at = first + d * stride
        g0, h0, w0 = g[d], h[d], matrix[at : at + width]
        for v in range(width):
            x[v] = x[v] + g0 * wide(w0[v])
            y[v] = y[v] + h0 * wide(w0[v])


COLUMNS = 64  # whose sums fit into the registers of AVX2


@intrinsic
def _add_block_products(
    typing: Any,  # noqa: ANN401
    h: types.Type,  # address of D float32
    n: types.Type,  # D
    matrix: types.Type,  # address of float32 [D,V], at the first of 64 columns
    stride: types.Type,  # V
    y: types.Type,  # address of 64 float32 to add to
) -> Any:  # noqa: ANN401
    """`add_products` of 64 columns, in the same order, with all sums kept in registers.

    For matrices that are in the near caches, where loading and storing sums would take longest.
    """
    del typing
    i64, f32 = ir.IntType(64), ir.FloatType()
    eight, lanes = ir.VectorType(f32, 8), COLUMNS // 8

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        del signature
        h, n, matrix, stride, y = arguments
        kind = ir.FunctionType(eight, [eight] * 3)
        fma = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v8f32")

        def at(address: Any, place: Any, kind: Any) -> Any:  # noqa: ANN401
            place = builder.mul(place, i64(4))
            return builder.inttoptr(builder.add(address, place), kind.as_pointer())

        def lane(place: Any, number: int) -> Any:  # noqa: ANN401
            return builder.add(place, i64(8 * number))

        sums = [
            cgutils.alloca_once_value(builder, builder.load(at(y, i64(8 * i), eight), align=4))
            for i in range(lanes)
        ]

        def add_row(d: Any) -> None:  # noqa: ANN401
            number = builder.load(at(h, d, f32))
            one = builder.insert_element(ir.Constant(eight, ir.Undefined), number, i64(0))
            indices = ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8)
            spread = builder.shuffle_vector(one, one, indices)
            row = builder.mul(d, stride)
            for i, total in enumerate(sums):
                weights = builder.load(at(matrix, lane(row, i), eight), align=4)
                builder.store(builder.call(fma, [spread, weights, builder.load(total)]), total)

        eighth = builder.udiv(n, i64(8))
        with cgutils.for_range(builder, eighth) as loop:
            for part in range(8):
                add_row(builder.add(loop.index, builder.mul(eighth, i64(part))))
        done = builder.mul(eighth, i64(8))
        with cgutils.for_range(builder, builder.sub(n, done)) as loop:
            add_row(builder.add(loop.index, done))
        for i, total in enumerate(sums):
            builder.store(builder.load(total), at(y, i64(8 * i), eight), align=4)
        return context.get_dummy_value()

    return types.void(h, n, matrix, stride, y), generate


add_block_products: Any = _add_block_products


@ordered
def score_one_nearby(h: Floats, matrix: Floats, size: int, scores: Floats) -> None:
    """`score_one` of a matrix of float32 in the near caches."""
    done = 0
    if HAS_AVX2:
        while done + COLUMNS <= size:
            add_block_products(
                h.ctypes.data,
                h.shape[0],
                matrix.ctypes.data + 4 * done,
                size,
                scores.ctypes.data + 4 * done,
            )
            done += COLUMNS
    if done < size:
        add_products(h, matrix, done, size, scores[done:size])


@ordered
def score_one(h: Floats, matrix: Floats, first: int, size: int, scores: Floats) -> None:
    """Products of one row with a matrix, added to scores [V]."""
    for begin in range(0, size, ONE_ROW_TILE):
        end = min(begin + ONE_ROW_TILE, size)
        add_products(h, matrix, first + begin, size, scores[begin:end])


@ordered
def score_many(
    hidden: Floats, rows: Integers, matrix: Floats, first: int, size: int, scores: Floats
) -> None:
    """Products of several rows with one matrix, added to scores [T,V]."""
    n = rows.shape[0]
    for begin in range(0, size, TILE):
        end = min(begin + TILE, size)
        t = 0
        while t + 2 <= n:
            add_products_of_two(
                hidden[rows[t]],
                hidden[rows[t + 1]],
                matrix,
                first + begin,
                size,
                scores[t, begin:end],
                scores[t + 1, begin:end],
            )
            t += 2
        if t < n:
            add_products(hidden[rows[t]], matrix, first + begin, size, scores[t, begin:end])


# --- of whole numbers --------------------------------------------------------------------------

BLOCK = 32  # bytes of a vector of AVX2


@intrinsic
def _dots_of_four(
    typing: Any,  # noqa: ANN401
    x: types.Type,  # address of blocks of int8
    matrix: types.Type,  # address of the first of four rows of int8
    width: types.Type,  # of a row, at least a block
    sums: types.Type,  # address of four int32 to fill in
) -> Any:  # noqa: ANN401
    """Sums of products of x with four rows, 32 at a time, which LLVM does not find by itself.

    AVX2 multiplies unsigned by signed bytes, so the sign of x goes to the row. Where width is no
    multiple of 32 the last block overlaps the one before, and x is zero where they do.
    """
    del typing
    i8, i16, i32, i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
    bytes32, shorts, ints = ir.VectorType(i8, 32), ir.VectorType(i16, 16), ir.VectorType(i32, 8)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        del signature
        x, matrix, width, sums = arguments

        def operation(name: str, result: Any, *given: Any) -> Any:  # noqa: ANN401
            kind = ir.FunctionType(result, [value.type for value in given])
            function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
            return builder.call(function, given)

        def load(address: Any) -> Any:  # noqa: ANN401
            return builder.load(builder.inttoptr(address, bytes32.as_pointer()), align=1)

        ones = ir.Constant(shorts, [1] * 16)
        totals = [cgutils.alloca_once_value(builder, ir.Constant(ints, [0] * 8)) for _ in range(4)]
        blocks = builder.udiv(builder.add(width, i64(BLOCK - 1)), i64(BLOCK))
        with cgutils.for_range(builder, blocks) as loop:
            begin = builder.mul(loop.index, i64(BLOCK))
            last = builder.sub(width, i64(BLOCK))
            place = builder.select(builder.icmp_signed("<", begin, last), begin, last)
            signed = load(builder.add(x, begin))
            size = builder.select(
                builder.icmp_signed("<", signed, ir.Constant(bytes32, [0] * BLOCK)),
                builder.neg(signed),
                signed,
            )
            for row, total in enumerate(totals):
                offset = builder.add(builder.mul(width, i64(row)), place)
                weights = load(builder.add(matrix, offset))
                turned = operation("avx2.psign.b", bytes32, weights, signed)
                pairs = operation("avx2.pmadd.ub.sw", shorts, size, turned)
                fours = operation("avx2.pmadd.wd", ints, pairs, ones)
                builder.store(builder.add(builder.load(total), fours), total)
        # Neighbours are added twice, within halves of a vector; then the halves.
        first, second, third, fourth = (builder.load(total) for total in totals)
        low = operation("avx2.phadd.d", ints, first, second)
        high = operation("avx2.phadd.d", ints, third, fourth)
        both = operation("avx2.phadd.d", ints, low, high)
        nothing = ir.Constant(ints, ir.Undefined)
        lanes = ir.VectorType(i32, 4)
        halves = [
            builder.shuffle_vector(both, nothing, ir.Constant(lanes, list(chosen)))
            for chosen in (range(4), range(4, 8))
        ]
        found = builder.add(*halves)
        builder.store(found, builder.inttoptr(sums, lanes.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(x, matrix, width, sums), generate


dots_of_four: Any = _dots_of_four


@ordered
def quantise(h: Floats, x: NDArray[np.int8]) -> np.float32:
    """The nearest whole numbers of steps, for the step that is returned; one step if h is zero.

    They are laid out in blocks, the last of which ends where the row ends: see `dots_of_four`.
    """
    n = h.shape[0]
    largest = TINY
    for d in range(n):
        largest = max(largest, abs(h[d]))
    steps = STEPS / largest
    x[:] = 0
    full = n // BLOCK * BLOCK if n >= BLOCK else n
    for d in range(full):
        x[d] = np.int8((h[d] * steps + ROUNDER) - ROUNDER)
    for d in range(full, n):
        x[full + BLOCK - n + d] = np.int8((h[d] * steps + ROUNDER) - ROUNDER)
    return largest / STEPS


@ordered
def blocks_of(width: int) -> int:
    """How many bytes `quantise` fills for a row."""
    return (width + BLOCK - 1) // BLOCK * BLOCK


@ordered
def integer_dot(x: NDArray[np.int8], row: NDArray[np.int8]) -> np.int32:
    """What `dots_of_four` does, of one row and of any width, in plain steps."""
    width = row.shape[0]
    full = width // BLOCK * BLOCK if width >= BLOCK else width
    total = np.int32(0)
    for d in range(full):
        # Said to be 32 bits at each step, or else the sum is made in 64.
        total = np.int32(total + np.int32(np.int32(x[d]) * np.int32(row[d])))
    for d in range(full, width):
        number = np.int32(x[full + BLOCK - width + d])
        total = np.int32(total + np.int32(number * np.int32(row[d])))
    return total


@ordered
def add_integer_products(
    x: NDArray[np.int8],  # as `quantise` lays it out
    step: np.float32,
    width: int,
    matrix: NDArray[np.int8],
    scales: Floats,
    first: int,
    y: Floats,
) -> None:
    """y[v] += scales[first + v] step (sum over d of x[d] matrix[(first + v) D + d])."""
    n, v = y.shape[0], 0
    if HAS_AVX2 and width >= BLOCK:
        sums = np.empty(4, np.int32)
        while v + 4 <= n:
            rows = matrix.ctypes.data + (first + v) * width
            dots_of_four(x.ctypes.data, rows, width, sums.ctypes.data)
            for i in range(4):
                y[v + i] = y[v + i] + np.float32(sums[i]) * scales[first + v + i] * step
            v += 4
    while v < n:
        at = (first + v) * width
        total = integer_dot(x, matrix[at : at + width])
        y[v] = y[v] + np.float32(total) * scales[first + v] * step
        v += 1


@ordered
def score_integers(
    hidden: Floats,
    rows: Integers,
    matrix: NDArray[np.int8],
    scales: Floats,
    first: int,
    size: int,
    scores: Floats,
) -> None:
    """About the products of rows with the matrix from its row `first` on, added to scores [T,V]."""
    n, width = rows.shape[0], hidden.shape[1]
    quantised, steps = np.empty((n, blocks_of(width)), np.int8), np.empty(n, np.float32)
    for t in range(n):
        steps[t] = quantise(hidden[rows[t]], quantised[t])
    tile = size if n == 1 else INTEGER_TILE
    for begin in range(0, size, tile):
        end = min(begin + tile, size)
        for t in range(n):
            add_integer_products(
                quantised[t], steps[t], width, matrix, scales, first + begin, scores[t, begin:end]
            )


@ordered
def fetch(array: Floats, first: int, n: int) -> None:
    """Have n float32 brought into the caches, line by line."""
    for place in range(first, first + n, 16):
        prefetch(array, place)


@reordered
def dot(a: Floats, b: Floats) -> np.float32:
    total = ZERO
    for v in range(a.shape[0]):
        total += a[v] * wide(b[v])
    return total
