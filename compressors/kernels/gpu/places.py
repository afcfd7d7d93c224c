"""Kernels for places: where the largest values are, and the Elias–Fano code of ascending indices.

What precedes a program is known from counts of all programs, summed in between: so every result has its one cell, and
no order of writes matters.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from commlib.codecs.slots import Carry
from commlib.compressors.kernels.gpu.jit import jit, launch
from commlib.compressors.kernels.gpu.tiles import MAGNITUDE, as_bits
from commlib.compressors.kernels.reference.bitpack import fields_nbytes, low_bits
from commlib.compressors.kernels.reference.topk import joined, moved

WIDTH = 2048  # values, or bytes of fields, of a program
BYTES = 256  # of a bit vector, of a program


@jit
def _sides(v: tl.tensor, i: tl.tensor, there: tl.tensor, least: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(values, which are larger than the least that is chosen, which are as large)."""
    x = tl.load(v + i, mask=there, other=0.0)
    size, limit = as_bits(x) & MAGNITUDE, tl.load(least)
    return x, (size > limit) & there, (size == limit) & there


@jit
def _count_largest(
    v: tl.tensor, n: tl.tensor, least: tl.tensor, counts: tl.tensor, programs: tl.tensor, WIDTH: tl.constexpr
) -> None:
    """How many values of each program are larger than the least that is chosen, then how many are as large."""
    p = tl.program_id(0).to(tl.int64)
    i = p * WIDTH + tl.arange(0, WIDTH)
    _, above, equal = _sides(v, i, i < n, least)
    tl.store(counts + p, tl.sum(above.to(tl.int32), axis=0))
    tl.store(counts + programs + p, tl.sum(equal.to(tl.int32), axis=0))


@jit
def _take_largest(
    v: tl.tensor, n: tl.tensor, k: tl.tensor, least: tl.tensor, sums: tl.tensor, programs: tl.tensor,
    places: tl.tensor, values: tl.tensor, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Write those that are chosen, in the order of their places; of the ones as large as the least the first."""
    p = tl.program_id(0).to(tl.int64)
    i = p * WIDTH + tl.arange(0, WIDTH)
    x, above, equal = _sides(v, i, i < n, least)
    before_above = tl.load(sums + p - 1, mask=p > 0, other=0)
    before_equal = tl.load(sums + programs + p - 1, mask=p > 0, other=0)
    room = k - tl.load(sums + programs - 1)
    a, e = above.to(tl.int32), equal.to(tl.int32)
    nth_above = before_above + (tl.cumsum(a, axis=0) - a)
    nth_equal = before_equal + (tl.cumsum(e, axis=0) - e)
    chosen = above | (equal & (nth_equal < room))
    cell = nth_above + tl.minimum(nth_equal, room)
    tl.store(places + cell, i, mask=chosen)
    tl.store(values + cell, x, mask=chosen)


def largest(x: Tensor, k: int, carry: Carry | None = None) -> tuple[Tensor, Tensor]:
    """Same as ``reference.topk.largest``, in Triton but for the search of the least that is chosen."""
    v = joined(x, carry)
    places = torch.empty(k, dtype=torch.int64, device=v.device)
    if not k:
        return places, v[:0]
    n, programs = v.numel(), -(-v.numel() // WIDTH)
    least = (v.view(torch.int32) & MAGNITUDE.value).topk(k, sorted=False).values.amin()
    counts, values = least.new_empty(2, programs), v.new_empty(k)
    launch(_count_largest, programs, v, v, n, least, counts, programs, WIDTH=WIDTH)
    sums = counts.cumsum(1)
    launch(_take_largest, programs, v, v, n, k, least, sums, programs, places, values, WIDTH=WIDTH)
    return places, values


def largest_moved(
    g: Tensor, k: int, m: float, old: Tensor, u: Tensor, carry: Carry, *, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """Same as ``reference.topk.largest_moved``; the largest are found by :func:`largest`."""
    return largest(moved(g, m, old, u, carry, nesterov=nesterov), k)


@jit
def _code_places(
    indices: tl.tensor, k: tl.tensor, low: tl.tensor, fields: tl.tensor, nbytes: tl.tensor, words: tl.tensor,
    SPAN: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Bytes of the low fields, each from the up to SPAN fields that lie in it; the bits of the upper part, as words."""
    b = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    mask = (tl.zeros((WIDTH,), tl.int64) + 1 << low) - 1
    byte = tl.zeros((WIDTH,), tl.int64)
    for j in tl.static_range(SPAN):
        f = b * 8 // low + j
        field = tl.load(indices + f, mask=(b < nbytes) & (f < k), other=0) & mask
        at = f * low - b * 8  # from the byte's first bit on
        part = tl.where(at >= 0, field << tl.minimum(tl.maximum(at, 0), 8), field >> tl.minimum(tl.maximum(-at, 0), 63))
        byte |= tl.where(at < 8, part & 255, 0)
    tl.store(fields + b, byte.to(tl.uint8), mask=b < nbytes)
    bit = (tl.load(indices + b, mask=b < k, other=0) >> low) + b
    one = tl.zeros((WIDTH,), tl.int32) + 1
    tl.atomic_or(words + bit // 32, one << (bit % 32).to(tl.int32), mask=b < k, sem="relaxed")


def places_encode(indices: Tensor, n: int, payload: Tensor) -> None:
    """Same as ``reference.bitpack.elias_fano_encode``, in Triton."""
    k = indices.numel()
    low = low_bits(n, k)
    head = fields_nbytes(k, low)
    length = payload.numel() - head
    words = torch.zeros(-(-length // 4), dtype=torch.int32, device=payload.device)
    span = 8 // low + 2 if low else 0
    programs = -(-max(k, head) // WIDTH)
    launch(_code_places, programs, payload, indices, k, low, payload, head, words, SPAN=span, WIDTH=WIDTH)
    payload[head:].copy_(words.view(torch.uint8)[:length])  # little-endian, as all that CUDA runs on


@jit
def _ones(byte: tl.tensor) -> tl.tensor:
    """How many bits of a byte are set."""
    pairs = byte - ((byte >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (fours + (fours >> 4)) & 15


@jit
def _count_bits(payload: tl.tensor, head: tl.tensor, length: tl.tensor, counts: tl.tensor, BYTES: tl.constexpr) -> None:
    """How many bits are set in each program's bytes."""
    p = tl.program_id(0).to(tl.int64)
    b = p * BYTES + tl.arange(0, BYTES)
    byte = tl.load(payload + head + b, mask=b < length, other=0).to(tl.int32)
    tl.store(counts + p, tl.sum(_ones(byte), axis=0))


@jit
def _find_places(
    payload: tl.tensor, head: tl.tensor, length: tl.tensor, sums: tl.tensor, k: tl.tensor, low: tl.tensor,
    most: tl.tensor, places: tl.tensor, SPAN: tl.constexpr, BYTES: tl.constexpr,
) -> None:  # fmt: skip
    """The i-th set bit and the i-th field make the i-th place."""
    p = tl.program_id(0).to(tl.int64)
    b = p * BYTES + tl.arange(0, BYTES)
    byte = tl.load(payload + head + b, mask=b < length, other=0).to(tl.int32)
    ones = _ones(byte)
    before = tl.load(sums + p - 1, mask=p > 0, other=0) + (tl.cumsum(ones, axis=0) - ones)
    place = tl.arange(0, 8)[None, :]
    i = before[:, None] + _ones(byte[:, None] & ((tl.zeros_like(place) + 1 << place) - 1))
    found = (((byte[:, None] >> place) & 1) > 0) & (i < k)
    field = tl.zeros_like(i)
    for j in tl.static_range(SPAN):
        at = i * low // 8 + j
        part = tl.load(payload + at, mask=found & (at < head), other=0).to(tl.int64)
        left = at * 8 - i * low
        field |= tl.where(left >= 0, part << tl.minimum(tl.maximum(left, 0), 63), part >> tl.maximum(-left, 0))
    field &= (tl.zeros_like(i) + 1 << low) - 1
    upper = b[:, None] * 8 + place - i
    tl.store(places + i, tl.minimum((upper << low) | field, most), mask=found)


def places_decode(payload: Tensor, n: int, k: int) -> Tensor:
    """Same as ``reference.bitpack.elias_fano_decode``, in Triton; of bytes that are no code, other places below n."""
    low = low_bits(n, k)
    head = fields_nbytes(k, low)
    length = payload.numel() - head
    programs = -(-length // BYTES)
    counts = torch.empty(programs, dtype=torch.int32, device=payload.device)
    launch(_count_bits, programs, payload, payload, head, length, counts, BYTES=BYTES)
    places = torch.zeros(k, dtype=torch.int64, device=payload.device)
    span = (low + 14) // 8 if low else 0
    args = (payload, head, length, counts.cumsum(0), k, low, n - 1, places)
    launch(_find_places, programs, payload, *args, SPAN=span, BYTES=BYTES)
    return places


def places_add(payload: Tensor, values: Tensor, scale: float, out: Tensor) -> None:
    """Same as ``reference.codecs.places_add``, with the places found in Triton."""
    places = places_decode(payload, out.numel(), values.numel())
    out.index_add_(0, places, values if scale == 1 else values * scale)
