"""LLVM written by hand: products of a row of 16 bits with several rows of 8, wherever these are.

LLVM finds the instructions for it in no loop of numba's. `int16_products` lays x out as each of
them needs it, and has the plain loop that they equal in every bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.extending import intrinsic

cgutils: Any = untyped_cgutils

HAS_VNNI = all(get_host_cpu_features().get(name, False) for name in ("avx512vnni", "avx512bw"))
FOUR, EIGHT = 4, 8  # rows that are multiplied at once
WORDS = 16  # int16 of a vector of AVX2
BYTES = 64  # of a vector of AVX-512

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def _vector(kind: Any, lanes: int) -> Any:  # noqa: ANN401
    return ir.VectorType(kind, lanes)


def _call(builder: Any, name: str, result: Any, *given: Any) -> Any:  # noqa: ANN401
    kind = ir.FunctionType(result, [value.type for value in given])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    return builder.call(function, given)


def _load(builder: Any, address: Any, kind: Any) -> Any:  # noqa: ANN401
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _prefetch(builder: Any, address: Any) -> None:  # noqa: ANN401
    byte = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    line = builder.inttoptr(address, byte)
    builder.call(function, [line, I32(0), I32(3), I32(1)])  # to read, soon, data


def _rows(builder: Any, base: Any, ids: Any, width: Any, count: int) -> list[Any]:  # noqa: ANN401
    """Addresses of the rows whose numbers are at `ids`."""
    found = []
    for i in range(count):
        row = builder.sext(_load(builder, builder.add(ids, I64(4 * i)), I32), I64)
        found.append(builder.add(base, builder.mul(row, width)))
    return found


def _each_block(builder: Any, width: Any, size: int, add: Callable[[Any, Any], None]) -> None:  # noqa: ANN401
    """add(place in x, place in the rows); where width is no multiple of a block, the last one
    overlaps the one before."""
    full = builder.udiv(width, I64(size))
    with cgutils.for_range(builder, full) as loop:
        begin = builder.mul(loop.index, I64(size))
        add(begin, begin)
    done = builder.mul(full, I64(size))
    with builder.if_then(builder.icmp_signed("<", done, width)):
        add(done, builder.sub(width, I64(size)))


def _sum_of(builder: Any, one: Any, other: Any, *chosen: Sequence[int]) -> Any:  # noqa: ANN401
    """The sum of two choices among the numbers of two vectors."""
    parts = [
        builder.shuffle_vector(one, other, ir.Constant(_vector(I32, len(places)), [*places]))
        for places in chosen
    ]
    return builder.add(*parts)


def _in_quarters(places: Sequence[int]) -> list[int]:
    """The same choice in each quarter of two vectors of 16; the second one's places begin at 4."""
    return [4 * quarter + place % 4 + place // 4 * 16 for quarter in range(4) for place in places]


@intrinsic
def _dots_of_four_rows(
    typing: Any,  # noqa: ANN401
    x: types.Type,  # address of blocks of WORDS int16
    base: types.Type,  # address of rows of int8
    ids: types.Type,  # address of four int32: which rows
    width: types.Type,  # of a row, at least WORDS
    sums: types.Type,  # address of four int32 to fill in
) -> Any:  # noqa: ANN401
    """By AVX2: weights are widened, and pairs of products added. Sums may wrap on the way; they are
    right if the whole sum fits into 32 bits."""
    del typing
    block, shorts, ints = _vector(I8, WORDS), _vector(I16, WORDS), _vector(I32, WORDS // 2)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        del signature
        x, base, ids, width, sums = arguments
        rows = _rows(builder, base, ids, width, FOUR)
        zero = ir.Constant(ints, [0] * 8)
        totals = [cgutils.alloca_once_value(builder, zero) for _ in rows]

        def add_block(begin: Any, place: Any) -> None:  # noqa: ANN401
            numbers = _load(builder, builder.add(x, builder.mul(begin, I64(2))), shorts)
            for row, total in zip(rows, totals, strict=True):
                weights = builder.sext(_load(builder, builder.add(row, place), block), shorts)
                pairs = _call(builder, "avx2.pmadd.wd", ints, numbers, weights)
                builder.store(builder.add(builder.load(total), pairs), total)

        _each_block(builder, width, WORDS, add_block)
        # Neighbours are added twice, within halves of a vector; then the halves.
        one, two, three, four = (builder.load(total) for total in totals)
        low = _call(builder, "avx2.phadd.d", ints, one, two)
        high = _call(builder, "avx2.phadd.d", ints, three, four)
        both = _call(builder, "avx2.phadd.d", ints, low, high)
        found = _sum_of(builder, both, both, range(4), range(4, 8))
        builder.store(found, builder.inttoptr(sums, found.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(x, base, ids, width, sums), generate


@intrinsic
def _dots_of_eight_rows(
    typing: Any,  # noqa: ANN401
    x: types.Type,  # address of blocks of BYTES lower bytes and as many upper ones, and after them
    # an int32 to be added to each sum
    base: types.Type,  # address of rows of int8
    ids: types.Type,  # address of eight int32: which rows
    width: types.Type,  # of a row, at least BYTES
    jump: types.Type,  # what is so many bytes behind each row is asked for ahead of its use
    sums: types.Type,  # address of eight int32 to fill in
) -> Any:  # noqa: ANN401
    """By AVX-512 VNNI, which multiplies unsigned by signed bytes and adds fours of products.

    A weight w becomes unsigned if 128 is added, and x is 256 upper + lower, both signed. So the sum
    of x w is that of 256 upper (w + 128) and of lower (w + 128), less 128 times the sum of x: the
    correction. Sums may wrap on the way; they are right if the whole sum fits into 32 bits.
    """
    del typing
    block, ints = _vector(I8, BYTES), _vector(I32, BYTES // 4)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        del signature
        x, base, ids, width, jump, sums = arguments
        rows = _rows(builder, base, ids, width, EIGHT)
        zero, signs = ir.Constant(ints, [0] * 16), ir.Constant(block, [-128] * BYTES)
        totals = [
            [cgutils.alloca_once_value(builder, zero) for _ in range(2)] for _ in rows
        ]  # of lower bytes, of upper ones

        def add_block(begin: Any, place: Any) -> None:  # noqa: ANN401
            lower = builder.add(x, builder.mul(begin, I64(2)))
            numbers = [_load(builder, builder.add(lower, I64(at)), ints) for at in (0, BYTES)]
            for row, both in zip(rows, totals, strict=True):
                address = builder.add(row, place)
                _prefetch(builder, builder.add(address, jump))
                weights = builder.xor(_load(builder, address, block), signs)
                for part, total in zip(numbers, both, strict=True):
                    given = builder.load(total), builder.bitcast(weights, ints), part
                    more = _call(builder, "avx512.vpdpbusd.512", ints, *given)
                    builder.store(more, total)

        _each_block(builder, width, BYTES, add_block)
        eight = ir.Constant(ints, [8] * 16)
        found = [
            builder.add(builder.shl(builder.load(upper), eight), builder.load(lower))
            for lower, upper in totals
        ]
        # Quarters of vectors are added up, those of two rows, then four rows in one vector.
        for chosen in ((0, 4, 1, 5), (2, 6, 3, 7)), ((0, 1, 4, 5), (2, 3, 6, 7)):
            places = [_in_quarters(those) for those in chosen]
            pairs = zip(found[::2], found[1::2], strict=True)
            found = [_sum_of(builder, one, other, *places) for one, other in pairs]
        lower, upper = [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]
        both = _sum_of(builder, *found, lower, upper)
        total = _sum_of(
            builder, both, both, [*range(4), *range(8, 12)], [*range(4, 8), *range(12, 16)]
        )
        blocks = builder.udiv(builder.add(width, I64(BYTES - 1)), I64(BYTES))
        after = builder.add(x, builder.mul(blocks, I64(2 * BYTES)))
        correction = _load(builder, after, I32)
        spread = ir.Constant(total.type, ir.Undefined)
        spread = builder.insert_element(spread, correction, I32(0))
        spread = builder.shuffle_vector(spread, spread, ir.Constant(total.type, [0] * EIGHT))
        address = builder.inttoptr(sums, total.type.as_pointer())
        builder.store(builder.add(total, spread), address, align=4)
        return context.get_dummy_value()

    return types.void(x, base, ids, width, jump, sums), generate


# numba replaces these by the code above; to mypy they are functions of any arguments.
dots_of_four_rows: Any = _dots_of_four_rows
dots_of_eight_rows: Any = _dots_of_eight_rows
