"""Parts of kernels: which values a program has, what it reads and writes of them, and in what order it sums.

A tile has shape (ROWS, WIDTH): some values of each of some blocks. Index arithmetic is of 64 bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl

from commlib.compressors.kernels.gpu.jit import jit

MOST = 2048  # values of a program
BLOCK = 1024  # values that are summed before their sums are, as in `sums.fold`

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
LARGEST = tl.constexpr(0x7F7F0000)  # of bfloat16
RAISED = tl.constexpr(2.0**64)
SMALL = tl.constexpr(2.0**-64)
UNIT = tl.constexpr(2.0**-24)


class TileCut(NamedTuple):
    """How values in blocks are cut into tiles; FLAT: in tiles one after the other, whatever blocks they are of."""

    programs: int
    chunks: int
    ROWS: int
    WIDTH: int
    FLAT: bool

    @property
    def shape(self) -> dict[str, int | bool]:
        """The constants of a kernel that works on such tiles."""
        return {"ROWS": self.ROWS, "WIDTH": self.WIDTH, "FLAT": self.FLAT}


def cut(n: int, block: int, *, grain: int = 1, most: int = MOST) -> TileCut:
    """Tiles of n ≥ 1 values in blocks of ``block``; each begins at a multiple of ``grain`` (a power of two)."""
    if block < n and block % grain:
        return TileCut(-(-n // most), 1, 1, most, True)
    width = min(most, max(grain, triton.next_power_of_2(min(block, n))))
    chunks, blocks = -(-min(block, n) // width), -(-n // block)
    rows = min(most // width, triton.next_power_of_2(blocks))
    return TileCut(-(-blocks // rows) * chunks, chunks, rows, width, False)


class BitPacking(NamedTuple):
    """How whole numbers of a width in bits lie in bytes: GROUP of them fill BYTES, and each lies in up to SPAN."""

    WIDTH_IN_BITS: int
    GROUP: int
    BYTES: int
    SPAN: int

    @property
    def shape(self) -> dict[str, int]:
        """The constants of a kernel that packs."""
        return {"BITS": self.WIDTH_IN_BITS, "GROUP": self.GROUP, "BYTES": self.BYTES}


def packing(width: int) -> BitPacking:
    """Packing of numbers below 2^width, 1 ≤ width ≤ 16."""
    shared = math.gcd(8, width)
    return BitPacking(width, 8 // shared, width // shared, (8 - shared + width + 7) // 8)


@jit
def tile(
    n: tl.tensor, block: tl.tensor, chunks: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr, FLAT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(index of the first value of each row, index behind its last, its block); FLAT: the block of each value."""
    program = tl.program_id(0).to(tl.int64)
    if FLAT:
        first = program * WIDTH + tl.zeros((1, 1), tl.int64)
        last = tl.zeros((1, 1), tl.int64) + n
        row = (first + tl.arange(0, WIDTH)[None, :]) // block
    else:
        row = program // chunks * ROWS + tl.arange(0, ROWS)[:, None]
        first = row * block + program % chunks * WIDTH
        last = tl.minimum(row * block + block, n)
    return first, last, row


@jit
def joined(x: tl.tensor, old: tl.tensor, i: tl.tensor, there: tl.tensor, CARRIED: tl.constexpr) -> tl.tensor:
    """The values to encode; zero where there is none."""
    v = tl.load(x + i, mask=there, other=0.0)
    if CARRIED:
        if old.dtype.element_ty == tl.uint16:  # bfloat16's bits
            v += as_float(tl.load(old + i, mask=there, other=0).to(tl.int32) << 16)
        else:
            v += tl.load(old + i, mask=there, other=0.0)
    return v


@jit
def leave(new: tl.tensor, i: tl.tensor, left: tl.tensor, bar: tl.tensor, there: tl.tensor) -> None:
    """Keep what was not sent; to uint16 as the bits of bfloat16, as ``residuals.shorten`` has them."""
    if new.dtype.element_ty == tl.uint16:
        size, sign = as_bits(left) & MAGNITUDE, (as_bits(left) >> 16) & 0x8000
        size = tl.where(size < LARGEST, size, tl.where(size < INFINITE, LARGEST, 0x7FC00000))
        tl.store(new + i, (((size + bar) >> 16) | sign).to(tl.uint16), mask=there)
    else:
        tl.store(new + i, left, mask=there)


@jit
def floats(payload: tl.tensor) -> tl.tensor:
    """A payload's bytes as float32."""
    return payload.to(tl.pointer_type(tl.float32))


@jit
def as_bits(x: tl.tensor) -> tl.tensor:
    """The bits of float32."""
    return x.to(tl.int32, bitcast=True)


@jit
def as_float(x: tl.tensor) -> tl.tensor:
    """Float32 with these bits."""
    return x.to(tl.float32, bitcast=True)


@jit
def halved(v: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Sums of rows: the first half plus the second, until one is left; shape (ROWS, WIDTH) → (ROWS,).

    Each step is Triton's sum of two, which has one result in whatever order it takes them; its sum of more has not.
    A sum of zeros is +0.
    """
    for step in tl.static_range(10):
        if WIDTH >> step > 1:
            v = tl.sum(tl.reshape(v, (ROWS, 2, WIDTH >> (step + 1))), axis=1)
    return tl.reshape(v, (ROWS,)) + 0.0


@jit
def normal(absmax: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(up, down, power): v·up·down is v over the largest power of two ≤ absmax, as ``reference._normal`` has them."""
    up = tl.where(absmax < SMALL, RAISED, 1.0)
    finite = as_bits(absmax) < INFINITE
    usable = finite & (absmax > 0.0)
    power = as_float(tl.where(usable, as_bits(absmax * up) & INFINITE, 0x3F800000))
    down = tl.where(usable, tl.div_rn(1.0, power), 0.0)
    return up, down, tl.where(finite, tl.div_rn(power, up), float("nan"))


@jit
def units(v: tl.tensor, up: tl.tensor, down: tl.tensor) -> tl.tensor:
    """v over the power of two of its block; zero where that has a value that is not finite."""
    return tl.where(down > 0.0, v * up * down, 0.0)


@jit
def uniform(i: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Number i of those that ``random.uniform`` draws with this key, whose words are given as signed."""
    key = high.to(tl.uint32, bitcast=True)
    x = i.to(tl.uint32) + low.to(tl.uint32, bitcast=True)
    x = ((x ^ (x >> 16)) * 0x45D9F3B) ^ key
    x = ((x ^ (x >> 16)) * 0x7FEB352D) ^ key
    x = ((x ^ (x >> 16)) * 0x45D9F3B) ^ key
    x = x ^ (x >> 16)
    return (x >> 8).to(tl.int32).to(tl.float32) * UNIT


@jit
def pack(
    codes: tl.tensor, fields: tl.tensor, first: tl.tensor, last: tl.tensor, nbytes: tl.tensor, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BYTES: tl.constexpr,
) -> None:  # fmt: skip
    """Write whole numbers below 2^BITS, zero where there is no value; every row begins a group."""
    groups = tl.reshape(codes, (ROWS, WIDTH // GROUP, GROUP))
    at = first + GROUP * tl.arange(0, WIDTH // GROUP)[None, :]
    byte = at // GROUP * BYTES
    place = BITS * tl.arange(0, GROUP)[None, None, :]
    for k in tl.static_range(BYTES):
        left = tl.minimum(tl.maximum(place - 8 * k, 0), 31)
        right = tl.minimum(tl.maximum(8 * k - place, 0), 31)
        parts = ((groups << left) >> right) & 255
        there = (at < last) & (byte + k < nbytes)
        tl.store(fields + byte + k, tl.sum(parts, axis=2).to(tl.uint8), mask=there)


@jit
def unpack(
    fields: tl.tensor, i: tl.tensor, there: tl.tensor, nbytes: tl.tensor, BITS: tl.constexpr, SPAN: tl.constexpr
) -> tl.tensor:
    """The i-th of the numbers that :func:`pack` writes."""
    byte = i * BITS // 8
    word = tl.load(fields + byte, mask=there, other=0).to(tl.int32)
    for k in tl.static_range(1, SPAN):
        more = tl.load(fields + byte + k, mask=there & (byte + k < nbytes), other=0)
        word |= more.to(tl.int32) << (8 * k)
    return (word >> (i * BITS % 8).to(tl.int32)) & ((1 << BITS) - 1)
