"""Loops of the codec that sends powers of two. Arguments as in ``levels``."""

from __future__ import annotations

import numpy as np

from commlib.compressors.kernels.cpu.jit import Bytes, Floats, Scalar, Words, jit
from commlib.compressors.kernels.cpu.onebit import ZERO
from commlib.compressors.kernels.cpu.quantize import INFINITY, NAN, joined_absmax, normal, uniform

CHUNK = 4096
FRACTION, EXPONENT = np.int32(0x7FFFFF), np.int32(23)
TINY, UP = np.float32(2.0**-125), np.float32(2.0**125)
OF_FRACTION = np.float32(2.0**-23)
NEGATIVE = np.int32(128)


@jit
def natural_encode(
    x: Floats, old: Floats, v: Floats, carried: bool, scale: Floats, codes: Bytes, low: np.uint32, high: np.uint32
) -> None:
    """Same as the reference's ``natural_encode``."""
    absmax = joined_absmax(x, old, v, carried)
    up, down, power = normal(absmax)
    largest = scale[0] = (power if absmax > ZERO else ZERO) if absmax < INFINITY else NAN
    y, sent = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.int32)
    for first in range(0, len(v), CHUNK):
        part = v[first : first + CHUNK]
        if largest > ZERO:
            _units(part, up, down, y)
            _codes(part, y.view(np.int32), first, codes[first : first + CHUNK], sent, low, high)
        else:
            sent[:] = 0
            for i in range(len(part)):
                codes[first + i] = np.uint8(NEGATIVE if part[i] < ZERO else np.int32(0))
        if carried:
            _take(part, sent.view(np.float32), largest)


@jit
def _units(v: Floats, up: Scalar, down: Scalar, y: Floats) -> None:
    for i in range(len(v)):
        y[i] = abs(v[i]) * up * down


@jit
def _codes(v: Floats, bits: Words, first: int, codes: Bytes, sent: Words, low: np.uint32, high: np.uint32) -> None:
    """``bits`` are those of |v| over the scale, in [0, 2); ``sent`` takes those of what is decoded, unsigned."""
    y = bits.view(np.float32)
    for i in range(len(v)):
        exponent = bits[i] >> EXPONENT
        below = y[i] < TINY  # smaller than code 1: rounded at random to it or to zero
        share = y[i] * UP if below else np.float32(bits[i] & FRACTION) * OF_FRACTION
        code = np.int32(0) if below else exponent - np.int32(1)
        code += np.int32(1) if uniform(first + i, low, high) < share else np.int32(0)
        codes[i] = np.uint8(code + (NEGATIVE if v[i] < ZERO else np.int32(0)))
        sent[i] = (code + np.int32(1)) << EXPONENT if code > 0 else np.int32(0)


@jit
def _take(v: Floats, sent: Floats, largest: Scalar) -> None:
    for i in range(len(v)):
        value = sent[i] * largest
        v[i] -= -value if v[i] < ZERO else value


@jit
def natural_decode(scales: Floats, codes: Bytes, out: Floats, more: bool, scale: Scalar) -> None:
    """The sum over ranks; scales, shape (P, 1), codes, shape (P, n)."""
    factor, bits = np.float32(scale), np.empty(CHUNK, np.int32)
    for first in range(0, len(out), CHUNK):
        part = out[first : first + CHUNK]
        for p in range(len(scales)):
            _decoded(codes[p, first : first + CHUNK], bits)
            _valued(bits.view(np.float32), scales[p, 0], factor, part, more or p > 0)


@jit
def _decoded(codes: Bytes, bits: Words) -> None:
    """The bits of ±2^(c−126)."""
    for i in range(len(codes)):
        code = np.int32(codes[i])
        c = code & np.int32(127)
        sign = (code >> np.int32(7)) << np.int32(31)
        bits[i] = ((c + np.int32(1)) << EXPONENT) | sign if c > 0 else np.int32(0)


@jit
def _valued(powers: Floats, size: Scalar, factor: Scalar, out: Floats, more: bool) -> None:
    if more:
        for i in range(len(out)):
            out[i] += powers[i] * size * factor
    else:
        for i in range(len(out)):
            out[i] = powers[i] * size * factor
