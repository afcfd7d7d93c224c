"""Loops of ``orthonormal``."""

from __future__ import annotations

import math

import numpy as np

from commlib.compressors.kernels.cpu.jit import Doubles, Floats, Scalar, jit
from commlib.compressors.kernels.cpu.onebit import BLOCK, HALF, enough, folded, halved

_ZERO = 0.0


@jit
def orthonormal(p: Floats, spare: Floats, a: Doubles, scales: Doubles, sums: Doubles, half: Doubles) -> None:
    """Same as ``reference.orthonormal.orthonormal``, by numba.

    Args:
        p: (m, r).
        spare: (m, r).
        a: (r, m), of any content, as are those after it.
        scales: (r,).
        sums: (⌈m / 1024⌉,).
        half: (512,).
    """
    m, r = p.shape
    for j in range(r):
        _take(p, spare, a[j], j)
    for j in range(r):
        v = a[j, j:]
        norm, first = _root(_product(v, v, sums, half)), v[0]
        turned = norm * (norm + abs(first))
        scales[j] = 1 / turned if turned > _ZERO else _ZERO
        v[0] = first + np.copysign(norm, first)
        for k in range(j + 1, r):
            _apply(v, scales[j], a[k, j:], sums, half)
    for j in range(r - 1, -1, -1):
        v = a[j, j:]
        for k in range(j + 1, r):
            _apply(v, scales[j], a[k, j:], sums, half)
        s = scales[j] * v[0]
        for i in range(len(v)):
            v[i] = -(v[i] * s)
        v[0] += 1
        a[j, :j] = _ZERO
    for i in range(m):
        for j in range(r):
            p[i, j] = a[j, i]


@jit
def _take(p: Floats, spare: Floats, row: Doubles, j: int) -> None:
    some = False
    for i in range(len(row)):
        y = p[i, j]
        row[i] = y if np.isfinite(y) else _ZERO
        some = some or row[i] != _ZERO
    if not some:
        for i in range(len(row)):
            row[i] = spare[i, j]


@jit
def _root(x: Scalar) -> Scalar:
    """Same as ``reference.orthonormal._root``, by numba."""
    if not x > _ZERO:
        return _ZERO
    y = math.ldexp(1.0, math.frexp(x)[1] // 2)
    for _ in range(6):
        y = (y + x / y) * 0.5
    return y


@jit
def _apply(v: Doubles, s: Scalar, row: Doubles, sums: Doubles, half: Doubles) -> None:
    factor = _product(v, row, sums, half) * s
    for i in range(len(row)):
        row[i] -= factor * v[i]


@jit
def _product(x: Doubles, y: Doubles, sums: Doubles, half: Doubles) -> Scalar:
    """The sum of x·y, in the order of ``sums.fold``."""
    blocks = (len(x) + BLOCK - 1) // BLOCK
    for b in range(blocks):
        width = _products(x[b * BLOCK : (b + 1) * BLOCK], y[b * BLOCK : (b + 1) * BLOCK], half)
        sums[b] = halved(half, width)
    return folded(sums, blocks, half)


@jit
def _products(x: Doubles, y: Doubles, half: Doubles) -> Scalar:
    """Products of up to 1024 values, once halved; how many there are then."""
    n = len(x)
    width = HALF if n == BLOCK else enough(n)
    both = max(0, n - width)
    for i in range(both):
        half[i] = x[i] * y[i] + x[i + width] * y[i + width]
    for i in range(both, min(n, width)):
        half[i] = x[i] * y[i] + _ZERO  # of -0 and 0 the sum is 0
    for i in range(n, width):
        half[i] = _ZERO
    return width
