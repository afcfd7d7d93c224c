"""Operations on 64 values at a time, written in LLVM's vector types, which become whatever the machine has.

LLVM makes vectors of plain loops by itself, but not of those that gather one bit of each value, or give one to each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from commlib.codecs.residuals import BLOCK

WIDTH = 64
LINE = 64  # bytes
_MASK = ir.VectorType(ir.IntType(1), WIDTH)


def place_of(context: Any, builder: Any, kind: Any, array: Any, index: Any, width: int = WIDTH) -> Any:
    """A pointer to 64 values, or so many, of an array from an index on; they may lie at any boundary of one value."""
    held = context.make_array(kind)(context, builder, array)
    item = context.get_data_type(kind.dtype)
    return builder.bitcast(builder.gep(held.data, [index]), ir.VectorType(item, width).as_pointer())


def times(builder: Any, value: Any, width: int = WIDTH) -> Any:
    """64 times a value, or so often."""
    kind = ir.VectorType(value.type, width)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
    return builder.shuffle_vector(one, one, zeros)


def write(builder: Any, values: Any, place: Any, past: bool) -> None:
    """A store, or one past the caches, which does not read first what it overwrites; then the place is a line's."""
    stored = builder.store(values, place, align=LINE if past else 4)
    if past:
        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        stored.set_metadata("nontemporal", one)


def _compared(compare: Callable[[Any, Any, Any], Any]) -> Any:
    """An intrinsic (array, index, bound) → how 64 values compare with the bound, the first in the lowest bit."""

    def typed(typing: Any, array: Any, index: Any, bound: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = builder.load(place_of(context, builder, array, args[0], args[1]), align=4)
            return builder.bitcast(compare(builder, values, times(builder, args[2])), ir.IntType(WIDTH))

        return types.uint64(array, types.intp, array.dtype), generate

    return intrinsic(typed)


def _spread(more: bool, past: bool = False) -> Any:
    """An intrinsic (bits, low, up, out, index): 64 times ``up`` where the bit is set, else ``low``."""

    def typed(typing: Any, word: Any, low: Any, up: Any, out: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place = place_of(context, builder, out, args[3], args[4])
            mask = builder.bitcast(args[0], _MASK)
            values = builder.select(mask, times(builder, args[2]), times(builder, args[1]))
            if more:
                values = builder.fadd(builder.load(place, align=4), values)
            write(builder, values, place, past)
            return context.get_dummy_value()

        return types.void(types.uint64, out.dtype, out.dtype, out, types.intp), generate

    return intrinsic(typed)


def _join(typing: Any, x: Any, old: Any, v: Any, index: Any) -> Any:
    """64 values v = x + old, float32; ``old`` and ``v`` may be one array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = [place_of(context, builder, v, array, args[3]) for array in args[:3]]
        one, other = (builder.load(place, align=4) for place in places[:2])
        builder.store(builder.fadd(one, other), places[2], align=4)
        return context.get_dummy_value()

    return types.void(v, v, v, types.intp), generate


def _fence(typing: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _move(typing: Any, g: Any, factor: Any, old: Any, u: Any, index: Any) -> Any:
    """64 values u = factor·old + g, float32; any two may be one array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = [place_of(context, builder, u, array, args[4]) for array in (args[0], args[2], args[3])]
        g, old = (builder.load(place, align=4) for place in places[:2])
        builder.store(builder.fadd(builder.fmul(old, times(builder, args[1])), g), places[2], align=4)
        return context.get_dummy_value()

    return types.void(u, u.dtype, u, u, types.intp), generate


def _filled(bits: int, value: int, width: int = WIDTH) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(bits), width), [value] * width)


def _shorter(brain: bool) -> Any:
    """An intrinsic (float32 array, uint16 array, index): 64 values rounded to the nearest, half to even."""

    def half(builder: Any, values: Any) -> Any:
        halves = builder.fptrunc(values, ir.VectorType(ir.HalfType(), WIDTH))
        return builder.bitcast(halves, ir.VectorType(ir.IntType(16), WIDTH))

    def bfloat(builder: Any, values: Any) -> Any:
        bits = builder.bitcast(values, ir.VectorType(ir.IntType(32), WIDTH))
        upper = builder.lshr(bits, _filled(32, 16))
        bump = builder.add(builder.and_(upper, _filled(32, 1)), _filled(32, 0x7FFF))
        rounded = builder.lshr(builder.add(bits, bump), _filled(32, 16))
        is_nan = builder.fcmp_unordered("uno", values, values)
        return builder.trunc(builder.select(is_nan, _filled(32, 0x7FC0), rounded), ir.VectorType(ir.IntType(16), WIDTH))

    def typed(typing: Any, v: Any, short: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = builder.load(place_of(context, builder, v, args[0], args[2]), align=4)
            shorts = (bfloat if brain else half)(builder, values)
            builder.store(shorts, place_of(context, builder, short, args[1], args[2]), align=2)
            return context.get_dummy_value()

        return types.void(v, short, types.intp), generate

    return intrinsic(typed)


def _cut_off(typing: Any, v: Any, short: Any, index: Any, up: Any) -> Any:
    """64 float32 values as bfloat16 in an array of uint16: the bits that do not fit are cut off once ``up`` is added.

    What is too large becomes the largest there is, and what is not finite is NaN.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = builder.load(place_of(context, builder, v, args[0], args[2]), align=4)
        bits = builder.bitcast(values, ir.VectorType(ir.IntType(32), WIDTH))
        size, sign = builder.and_(bits, _filled(32, 0x7FFFFFFF)), builder.and_(bits, _filled(32, 0x80000000))
        finite = builder.icmp_unsigned("<", size, _filled(32, 0x7F800000))
        fits = builder.icmp_unsigned("<", size, _filled(32, 0x7F7F0000))
        size = builder.select(fits, size, builder.select(finite, _filled(32, 0x7F7F0000), _filled(32, 0x7FC00000)))
        size = builder.add(size, times(builder, builder.trunc(args[3], ir.IntType(32))))
        words = builder.lshr(builder.or_(size, sign), _filled(32, 16))
        shorts = builder.trunc(words, ir.VectorType(ir.IntType(16), WIDTH))
        builder.store(shorts, place_of(context, builder, short, args[1], args[2]), align=2)
        return context.get_dummy_value()

    return types.void(v, short, types.intp, types.intp), generate


def _wider(brain: bool, more: bool) -> Any:
    """An intrinsic (uint16 array, factor, float32 array, index): 64 values times a factor."""

    def typed(typing: Any, short: Any, factor: Any, out: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            shorts = builder.load(place_of(context, builder, short, args[0], args[3]), align=2)
            floats = ir.VectorType(ir.FloatType(), WIDTH)
            if brain:
                words = builder.zext(shorts, ir.VectorType(ir.IntType(32), WIDTH))
                values = builder.bitcast(builder.shl(words, _filled(32, 16)), floats)
            else:
                values = builder.fpext(builder.bitcast(shorts, ir.VectorType(ir.HalfType(), WIDTH)), floats)
            values = builder.fmul(values, times(builder, args[1]))
            place = place_of(context, builder, out, args[2], args[3])
            if more:
                values = builder.fadd(builder.load(place, align=4), values)
            builder.store(values, place, align=4)
            return context.get_dummy_value()

        return types.void(short, out.dtype, out, types.intp), generate

    return intrinsic(typed)


def _largest(width: int) -> Any:
    """An intrinsic (float32 array, index) → the bits of the largest magnitude of so many values."""

    def typed(typing: Any, v: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = builder.load(place_of(context, builder, v, args[0], args[1], width), align=4)
            words = ir.VectorType(ir.IntType(32), width)
            sizes = builder.and_(builder.bitcast(values, words), _filled(32, 0x7FFFFFFF, width))
            kind = ir.FunctionType(ir.IntType(32), [words])
            insert: Any = cgutils.get_or_insert_function
            reduce = insert(builder.module, kind, f"llvm.vector.reduce.smax.v{width}i32")
            return builder.call(reduce, [sizes])

        return types.int32(v, types.intp), generate

    return intrinsic(typed)


def _from_block(more: bool) -> Any:
    """An intrinsic (int8 array, index, scale, float32 array, index): 32 values times the scale."""

    def typed(typing: Any, codes: Any, at: Any, scale: Any, out: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            held = builder.load(place_of(context, builder, codes, args[0], args[1], BLOCK), align=1)
            values = builder.sitofp(held, ir.VectorType(ir.FloatType(), BLOCK))
            values = builder.fmul(values, times(builder, args[2], BLOCK))
            place = place_of(context, builder, out, args[3], args[4], BLOCK)
            if more:
                values = builder.fadd(builder.load(place, align=4), values)
            builder.store(values, place, align=4)
            return context.get_dummy_value()

        return types.void(codes, types.intp, out.dtype, out, types.intp), generate

    return intrinsic(typed)


def _to_block(typing: Any, v: Any, index: Any, factor: Any, up: Any, codes: Any, at: Any) -> Any:
    """32 float32 values times a factor, ``up`` added to their magnitudes, cut off to whole numbers from -127 to 127."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = builder.load(place_of(context, builder, v, args[0], args[1], BLOCK), align=4)
        values = builder.fmul(values, times(builder, args[2], BLOCK))
        words, floats = (ir.VectorType(kind, BLOCK) for kind in (ir.IntType(32), ir.FloatType()))
        sign = builder.and_(builder.bitcast(values, words), _filled(32, 0x80000000, BLOCK))
        bump = builder.or_(builder.bitcast(times(builder, args[3], BLOCK), words), sign)
        whole = builder.fptosi(builder.fadd(values, builder.bitcast(bump, floats)), words)
        for compare, bound in ((">", 127), ("<", -127)):
            limit = _filled(32, bound, BLOCK)
            whole = builder.select(builder.icmp_signed(compare, whole, limit), limit, whole)
        place = place_of(context, builder, codes, args[4], args[5], BLOCK)
        builder.store(builder.trunc(whole, ir.VectorType(ir.IntType(8), BLOCK)), place, align=1)
        return context.get_dummy_value()

    return types.void(v, types.intp, v.dtype, v.dtype, codes, types.intp), generate


def _seen_as(kind: Any, llvm: Any) -> Any:
    """An intrinsic of one number of 32 bits: its bits as another type."""

    def typed(typing: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], llvm)

        return kind(number), generate

    return intrinsic(typed)


def _of_word(operation: str) -> Any:
    """An intrinsic of one word of 64 bits."""

    def typed(typing: Any, word: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if operation == "ctpop":
                return builder.ctpop(args[0])
            return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

        return types.uint64(types.uint64), generate

    return intrinsic(typed)


at_least = _compared(lambda builder, values, bound: builder.fcmp_ordered(">=", values, bound))
"""(float32 array, index, float32) → which of 64 values are not less."""
magnitude_at_least = _compared(
    lambda builder, values, bound: builder.icmp_signed(
        ">=", builder.and_(values, ir.Constant(values.type, [0x7FFFFFFF] * WIDTH)), bound
    )
)
"""(the bits of float32 as an int32 array, index, int32) → which of 64 values are not less, their signs aside."""
put = _spread(more=False)
"""(bits, low, up, float32 array, index): 64 values are written."""
add = _spread(more=True)
"""The same, added."""
put_past = _spread(more=False, past=True)
"""As ``put``, past the caches, to the beginning of a line; a ``fence`` must follow before others may look."""
fence: Any = intrinsic(_fence)
"""What was written past the caches is there for all threads."""
to_half, to_brain = _shorter(brain=False), _shorter(brain=True)
"""(float32 array, uint16 array, index): 64 values as float16 or bfloat16."""
cut_off: Any = intrinsic(_cut_off)
join: Any = intrinsic(_join)
move: Any = intrinsic(_move)
put_half, put_brain = _wider(brain=False, more=False), _wider(brain=True, more=False)
"""(float16 or bfloat16 as an array of uint16, factor, float32 array, index): 64 values times the factor are written."""
add_half, add_brain = _wider(brain=False, more=True), _wider(brain=True, more=True)
"""The same, added."""
largest = _largest(WIDTH)
"""(float32 array, index) → the bits of the largest magnitude of 64 values, as int32; NaN is above infinity."""
largest_of_block = _largest(BLOCK)
"""The same of 32 values."""
put_block, add_block = _from_block(more=False), _from_block(more=True)
"""(int8 array, index, scale, float32 array, index): 32 values times the scale are written, or added."""
to_block: Any = intrinsic(_to_block)
as_float = _seen_as(types.float32, ir.FloatType())
"""The float32 of these bits, an int32."""
as_bits = _seen_as(types.int32, ir.IntType(32))
"""The bits of a float32, as an int32."""
popcount = _of_word("ctpop")
"""How many bits are set."""
lowest = _of_word("cttz")
"""The number of the lowest bit that is set, in a word that is not zero."""
