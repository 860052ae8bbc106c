"""LLVM written by hand: what numba does not generate from Python loops.

`python -m benchmarks.engines.intrinsics` compares each with numba's own loop, both in turns. On 2
cores of an AMD EPYC, which other work used too, numba's loop took 3.4 to 9.5 times as long for an
int8 expert (`dots_of_four`), 1.5 to 1.7 times for a gate of 64 experts (`add_block_products`; 0.8
times for one of 256), and rescoring 20 candidates took 1.1 to 1.2 times as long without
`prefetch`. The others have no form in numba: float16, and bits read as a float without
changing how the compiler fuses the operations around it.
"""

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.extending import intrinsic

cgutils: Any = untyped_cgutils

HAS_AVX2 = bool(get_host_cpu_features().get("avx2", False))
COLUMNS = 64  # whose sums fit into the registers of AVX2
BLOCK = 32  # bytes of a vector of AVX2


@intrinsic
def _widened(typing: Any, number: types.Type) -> Any:  # noqa: ANN401
    """A stored number as float32. numba has no float16; the processor widens eight at once."""
    del typing

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        del context, signature
        if number == types.float32:
            return arguments[0]
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(number), generate


@intrinsic
def _prefetch(typing: Any, array: types.Type, place: types.Type) -> Any:  # noqa: ANN401
    """Asks for one cache line of an array without waiting for it."""
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


def _chosen(comparison: str) -> Any:  # noqa: ANN401
    """One of two numbers, neither a NaN. LLVM makes vectors of a loop with it, not of Python's max,
    of which it cannot know that."""

    @intrinsic
    def chosen(typing: Any, one: types.Type, other: types.Type) -> Any:  # noqa: ANN401
        del typing, other

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
            del context, signature
            flags = ("nnan", "nsz")
            first = builder.fcmp_ordered(comparison, *arguments, flags=flags)
            return builder.select(first, *arguments, flags=flags)

        return one(one, one), generate

    return chosen


@intrinsic
def _float_of_bits(typing: Any, bits: types.Type) -> Any:  # noqa: ANN401
    del typing

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        del context, signature
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(bits), generate


def _add_block_products(columns: int) -> Any:  # noqa: ANN401
    """`add_products` of so many columns, in the same order, with all sums kept in registers.

    For matrices in the first caches, where loading and storing the sums would take longest.
    """

    @intrinsic
    def add(
        typing: Any,  # noqa: ANN401
        h: types.Type,  # address of D float32
        n: types.Type,  # D
        matrix: types.Type,  # address of float32 [D,V], at the first of the columns
        stride: types.Type,  # V
        y: types.Type,  # address of as many float32 to add to
    ) -> Any:  # noqa: ANN401
        del typing
        i64, f32 = ir.IntType(64), ir.FloatType()
        eight, lanes = ir.VectorType(f32, 8), columns // 8

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

    return add


@intrinsic
def _dots_of_four(
    typing: Any,  # noqa: ANN401
    x: types.Type,  # address of blocks of int8
    matrix: types.Type,  # address of the first of four rows of int8
    width: types.Type,  # of a row, at least a block
    sums: types.Type,  # address of four int32 to fill in
) -> Any:  # noqa: ANN401
    """Sums of products of x with four rows, 32 at a time; LLVM does not use these instructions by
    itself.

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


# numba replaces these by the code above; to mypy they are functions of any arguments.
widened: Any = _widened
prefetch: Any = _prefetch
larger: Any = _chosen(">")
smaller: Any = _chosen("<")
float_of_bits: Any = _float_of_bits
add_block_products: Any = _add_block_products(COLUMNS)
add_half_block_products: Any = _add_block_products(COLUMNS // 2)
dots_of_four: Any = _dots_of_four
