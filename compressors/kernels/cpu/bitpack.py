"""Loops that pack small whole numbers into bytes, some thousand at a time. Layouts: ``reference/bitpack.py``.

Loops of the code of sorted places. The layout, and what the numbers mean: ``reference/bitpack.py``.
"""

from __future__ import annotations

import numpy as np

from commlib.compressors.kernels.cpu import simd
from commlib.compressors.kernels.cpu.jit import Bytes, Floats, Places, Words, jit


@jit
def pack(codes: Words | Places, count: int, first: int, width: int, fields: Bytes) -> None:
    """Fields ``first`` … of ``width`` bits each. A byte is begun by the first field that lies in it."""
    if width == 8:
        part = fields[first : first + count]
        for i in range(len(part)):
            part[i] = np.uint8(codes[i])
    elif width == 4 and first % 2 == 0:
        part = fields[first // 2 : (first + count) // 2]
        for j in range(len(part)):
            part[j] = np.uint8(codes[2 * j] | codes[2 * j + 1] << 4)
        if count % 2:
            fields[(first + count) // 2] = np.uint8(codes[count - 1])
    elif width:
        for i in range(count):
            byte, shift = (first + i) * width // 8, (first + i) * width % 8
            word = np.uint64(codes[i]) << np.uint64(shift)
            fields[byte] = np.uint8(word) | (fields[byte] if shift else np.uint8(0))
            for k in range(1, (shift + width + 7) // 8):
                fields[byte + k] = np.uint8(word >> np.uint64(8 * k))


@jit
def unpack(fields: Bytes, first: int, count: int, width: int, codes: Words | Places) -> None:
    """Inverse of :func:`pack`."""
    if width == 8:
        part = fields[first : first + count]
        for i in range(len(part)):
            codes[i] = np.int32(part[i])
    elif width == 4 and first % 2 == 0:
        part = fields[first // 2 : (first + count) // 2]
        for j in range(len(part)):
            byte = part[j]
            codes[2 * j] = np.int32(byte & 15)
            codes[2 * j + 1] = np.int32(byte >> 4)
        if count % 2:
            codes[count - 1] = np.int32(fields[(first + count) // 2] & 15)
    else:
        for i in range(count):
            byte, shift = (first + i) * width // 8, (first + i) * width % 8
            word = np.uint64(0)
            for k in range((shift + width + 7) // 8):
                word |= np.uint64(fields[byte + k]) << np.uint64(8 * k)
            codes[i] = np.int64((word >> np.uint64(shift)) & np.uint64((1 << width) - 1))


@jit
def pack_trits(codes: Words, count: int, first: int, trits: Bytes) -> None:
    """Digits ``first`` (a multiple of 5) …; the last byte is filled up with zeros."""
    part = trits[first // 5 : (first + count) // 5]
    for j in range(len(part)):
        a, b, c, d, e = codes[5 * j], codes[5 * j + 1], codes[5 * j + 2], codes[5 * j + 3], codes[5 * j + 4]
        part[j] = np.uint8(a + 3 * b + 9 * c + 27 * d + 81 * e)
    if count % 5:
        rest = 0
        for i in range(count - 1, count - count % 5 - 1, -1):
            rest = 3 * rest + codes[i]
        trits[(first + count) // 5] = np.uint8(rest)


@jit
def unpack_trits(trits: Bytes, first: int, count: int, codes: Words) -> None:
    """Inverse of :func:`pack_trits`."""
    part = trits[first // 5 : (first + count) // 5]
    for j in range(len(part)):
        byte = np.int32(part[j])
        for k in range(5):
            codes[5 * j + k] = byte % np.int32(3)
            byte //= np.int32(3)
    rest = np.int32(trits[(first + count) // 5]) if count % 5 else np.int32(0)
    for i in range(count - count % 5, count):
        codes[i] = rest % np.int32(3)
        rest //= np.int32(3)


@jit
def encode(places: Places, low: int, fields: Bytes, upper: Bytes) -> None:
    """As ``bits.elias_fano_encode``: the lowest ``low`` bits of each, and a bit for the rest of each."""
    pack(places & np.int64((1 << low) - 1), len(places), 0, low, fields)
    upper[:] = 0
    for i in range(len(places)):
        bit = (places[i] >> low) + i
        upper[bit // 8] |= np.uint8(1 << (bit % 8))


@jit
def decode(fields: Bytes, upper: Bytes, low: int, n: int, places: Places) -> None:
    """As ``bits.elias_fano_decode``: within [0, n) whatever the bytes are."""
    k, found = len(places), 0
    unpack(fields, 0, k, low, places)
    for j in range(len(upper)):
        byte = np.uint64(upper[j])
        while byte and found < k:
            rest = 8 * j + np.int64(simd.lowest(byte)) - found
            places[found] = min(n - 1, (rest << low) | places[found])
            byte &= byte - np.uint64(1)
            found += 1
    places[found:] = 0


@jit
def add(fields: Bytes, upper: Bytes, low: int, values: Floats, scale: np.float32, out: Floats) -> None:
    """Add ``scale`` times each value where :func:`decode` says; in the same pass."""
    places = np.empty(len(values), np.int64)
    decode(fields, upper, low, len(out), places)
    for i in range(len(values)):
        out[places[i]] += scale * values[i]
