"""Loops of the code of sorted places. The layout, and what the numbers mean: ``reference/bitpack.py``."""

from __future__ import annotations

import numpy as np

from commlib.compressors.kernels.cpu import simd
from commlib.compressors.kernels.cpu.bitpack import pack, unpack
from commlib.compressors.kernels.cpu.jit import Bytes, Places, jit


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
