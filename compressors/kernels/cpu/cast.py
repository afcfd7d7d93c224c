"""Loops of the codecs that shorten the floating-point format. Arguments as in ``levels``; ``brain`` is bfloat16."""

from __future__ import annotations

import platform
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from commlib.compressors.kernels.cpu import simd
from commlib.compressors.kernels.cpu.jit import Floats, Scalar, jit
from commlib.compressors.kernels.cpu.onebit import add

CHUNK = 4096
MINUS = np.float32(-1)
Shorts = np.ndarray[Any, np.dtype[np.uint16]]


def has_half() -> bool:
    """Whether this CPU converts float16, without which LLVM would call a library that may not be there."""
    return platform.machine() in ("aarch64", "arm64") or bool(llvm.get_host_cpu_features().get("f16c"))


@jit
def _shorten(v: Floats, short: Shorts, i: int, brain: bool) -> None:
    if brain:
        simd.to_brain(v, short, i)
    else:
        simd.to_half(v, short, i)


@jit
def _widen(short: Shorts, factor: Scalar, out: Floats, i: int, brain: bool, more: bool) -> None:
    if brain and more:
        simd.add_brain(short, factor, out, i)
    elif brain:
        simd.put_brain(short, factor, out, i)
    elif more:
        simd.add_half(short, factor, out, i)
    else:
        simd.put_half(short, factor, out, i)


@jit
def cast_encode(x: Floats, old: Floats, v: Floats, carried: bool, short: Shorts, brain: bool) -> None:
    """As the reference's, but for the bits of a NaN."""
    floats, shorts = np.zeros(simd.WIDTH, np.float32), np.empty(simd.WIDTH, np.uint16)
    for first in range(0, len(v), CHUNK):
        part, there = v[first : first + CHUNK], short[first : first + CHUNK]
        if carried:
            add(x[first : first + CHUNK], old[first : first + CHUNK], part)
        whole = len(part) // simd.WIDTH * simd.WIDTH
        for i in range(0, whole, simd.WIDTH):
            _shorten(part, there, i, brain)
            if carried:
                _widen(there, MINUS, part, i, brain, True)
        rest = len(part) - whole
        if rest:
            floats[:rest] = part[whole:]
            _shorten(floats, shorts, 0, brain)
            there[whole:] = shorts[:rest]
            if carried:
                _widen(shorts, MINUS, floats, 0, brain, True)
                part[whole:] = floats[:rest]


@jit
def shorten(v: Floats, short: Shorts, up: int) -> None:
    """Same as ``residuals.shorten``."""
    whole = len(v) // simd.WIDTH * simd.WIDTH
    for i in range(0, whole, simd.WIDTH):
        simd.cut_off(v, short, i, up)
    rest = len(v) - whole
    if rest:
        floats, shorts = np.zeros(simd.WIDTH, np.float32), np.empty(simd.WIDTH, np.uint16)
        floats[:rest] = v[whole:]
        simd.cut_off(floats, shorts, 0, up)
        short[whole:] = shorts[:rest]


@jit
def cast_decode(short: Shorts, out: Floats, brain: bool, more: bool, scale: Scalar) -> None:
    """The sum over ranks; short, shape (P, n)."""
    factor = np.float32(scale)
    floats, shorts = np.zeros(simd.WIDTH, np.float32), np.zeros(simd.WIDTH, np.uint16)
    for first in range(0, len(out), CHUNK):
        part = out[first : first + CHUNK]
        whole = len(part) // simd.WIDTH * simd.WIDTH
        rest = len(part) - whole
        for p in range(len(short)):
            there = short[p, first : first + CHUNK]
            for i in range(0, whole, simd.WIDTH):
                _widen(there, factor, part, i, brain, more or p > 0)
            if rest:
                shorts[:rest], floats[:rest] = there[whole:], part[whole:]
                _widen(shorts, factor, floats, 0, brain, more or p > 0)
                part[whole:] = floats[:rest]
