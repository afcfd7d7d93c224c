"""One-bit codecs' work on a block, in LLVM's vector types, while memory brings the next one.

See :mod:`.vector`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from commlib.compressors.kernels.cpu.simd import LINE, WIDTH, place_of, times, write

BLOCK = 1024  # values
LANES = 8  # values at a time: of so many the sums of both sides stay in registers
_NUMBER, _EIGHT = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)


def _ask(builder: Any, place: Any) -> None:
    """Prefetch a line that the next call reads into the second cache. It need not be there at all."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    insert: Any = cgutils.get_or_insert_function
    how = [ir.Constant(word, n) for n in (0, 2, 1)]  # to read, for the second cache, data
    builder.call(insert(builder.module, kind, "llvm.prefetch.p0"), [builder.bitcast(place, byte), *how])


class _Sides:
    """The code of ``sides`` for one block, written down value by value, eight at a time.

    1024 values are halved with their places as digits: i = 64k + 8j + m. First over k, for eight values of m at a time,
    whose sums stay in registers; then over j, then over m.
    """

    def __init__(self, builder: Any, x: Any, old: Any, v: Any, bits: Any, *, carried: bool) -> None:
        self._builder, self._x, self._old, self._v, self._bits = builder, x, old, v, bits
        self._carried = carried
        self.ones = ir.Constant(_NUMBER, 0)

    def sums(self) -> list[Any]:
        """Sums of the values ≥ 0, and of the others."""
        groups = [self._over_k(LANES * j, WIDTH, BLOCK // WIDTH) for j in range(WIDTH // LANES)]
        while len(groups) > 1:
            half = len(groups) // 2
            groups = [self._added(*both) for both in zip(groups[:half], groups[half:], strict=True)]
        return [self._over_m(side) for side in groups[0]]

    def _over_k(self, first: int, step: int, count: int) -> tuple[Any, Any]:
        """Both sides of ``count`` times eight values that lie ``step`` apart: the first half plus the second."""
        if count == 1:
            return self._eight(first)
        return self._added(*(self._over_k(first + half * step, 2 * step, count // 2) for half in range(2)))

    def _added(self, one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
        up, low = (self._builder.fadd(a, b) for a, b in zip(one, other, strict=True))
        return up, low

    def _over_m(self, values: Any) -> Any:
        builder = self._builder
        for width in (LANES // 2, LANES // 4, LANES // 8):
            kind = ir.VectorType(ir.IntType(32), width)
            halves = [ir.Constant(kind, [*range(first, first + width)]) for first in (0, width)]
            values = builder.fadd(*(builder.shuffle_vector(values, values, half) for half in halves))
        return builder.extract_element(values, ir.Constant(ir.IntType(32), 0))

    def _eight(self, i: int) -> tuple[Any, Any]:
        """Their sum with what was carried, their bits, and both sides, each with zeros for the other's."""
        builder = self._builder
        if i % (LINE // 4) == 0:
            for array in (self._x, self._old) if self._carried else (self._x,):
                _ask(builder, builder.gep(array, [ir.Constant(_NUMBER, i + BLOCK)]))
        values = builder.load(self._at(self._x, i), align=4)
        if self._carried:
            values = builder.fadd(values, builder.load(self._at(self._old, i), align=4))
            builder.store(values, self._at(self._v, i), align=4)
        zeros = ir.Constant(_EIGHT, [0.0] * LANES)
        upper = builder.fcmp_ordered(">=", values, zeros)
        byte = builder.bitcast(upper, ir.IntType(LANES))
        builder.store(byte, builder.gep(self._bits, [ir.Constant(_NUMBER, i // 8)]))
        self.ones = builder.add(self.ones, builder.zext(builder.ctpop(byte), _NUMBER))
        return builder.select(upper, values, zeros), builder.select(upper, zeros, values)

    def _at(self, array: Any, i: int) -> Any:
        return self._builder.bitcast(self._builder.gep(array, [ir.Constant(_NUMBER, i)]), _EIGHT.as_pointer())


def _sides(carried: bool) -> Any:
    """An intrinsic (x, old, v, bits, sums) → ones; see ``sides``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arrays = zip(signature.args, args, strict=True)
        *given, out = [context.make_array(kind)(context, builder, array).data for kind, array in arrays]
        code = _Sides(builder, *given, carried=carried)
        for side, total in enumerate(code.sums()):
            builder.store(total, builder.gep(out, [ir.Constant(_NUMBER, side)]))
        return code.ones

    def typed(typing: Any, x: Any, old: Any, v: Any, bits: Any, sums: Any) -> Any:
        return types.int64(x, old, v, bits, sums), generate

    return intrinsic(typed)


def _ask_64(typing: Any, array: Any, index: Any) -> Any:
    """An intrinsic (float32 array, index)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start = builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])
        for i in range(0, WIDTH, LINE // 4):
            _ask(builder, builder.gep(start, [ir.Constant(_NUMBER, i)]))
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _less(past: bool) -> Any:
    """An intrinsic (v, low, up, out, index): 64 values less ``up`` where they are ≥ 0, else less ``low``."""

    def typed(typing: Any, v: Any, low: Any, up: Any, out: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = builder.load(place_of(context, builder, v, args[0], args[4]), align=4)
            upper = builder.fcmp_ordered(">=", values, ir.Constant(values.type, [0.0] * WIDTH))
            mean = builder.select(upper, times(builder, args[2]), times(builder, args[1]))
            write(builder, builder.fsub(values, mean), place_of(context, builder, v, args[3], args[4]), past)
            return context.get_dummy_value()

        return types.void(v, v.dtype, v.dtype, v, types.intp), generate

    return intrinsic(typed)


sides, sides_joined = _sides(carried=False), _sides(carried=True)
"""(x, old, v, bits, sums) → how many of 1024 values x, or v = x + old, are ≥ 0: these get a bit, and ``sums[0]``.

``sums[1]`` is the sum of the others, both as ``sums.fold`` has them. Float32, and 128 bytes.
"""
ask: Any = intrinsic(_ask_64)
"""(float32 array, index): 64 values that are read soon come to the second cache meanwhile, if they are there."""
less, less_past = _less(past=False), _less(past=True)
"""(float32 array, low, up, float32 array, index): 64 values less the mean of their side, into either array."""
