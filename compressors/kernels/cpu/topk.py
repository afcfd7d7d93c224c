"""Loops of the codecs that send the values of largest magnitude.

The k-th largest magnitude is first guessed from a sample, a little too low; one pass then lists what is not below the
guess, some more than k, of which the k largest are taken exactly. So what is sent does not depend on the sample.
Magnitudes are compared by their bits as int32: infinity is above all that is finite, and NaN above infinity.
"""

from __future__ import annotations

import numpy as np

from commlib.compressors.kernels.cpu import simd
from commlib.compressors.kernels.cpu.jit import Floats, Places, Scalar, Words, jit
from commlib.compressors.kernels.cpu.onebit import BLOCK, add
from commlib.compressors.kernels.cpu.quantize import MAGNITUDE, hash32

SAMPLE = 32768


@jit
def strata(n: int, low: np.uint32, high: np.uint32, places: Places, sizes: Places) -> None:
    """Index in each of len(places) strata of n values, and how many values a stratum has."""
    k, first = len(places), 0
    for j in range(k):
        end = (j + 1) * n // k
        sizes[j] = end - first
        places[j] = first + (np.int64(hash32(j, low, high)) * (end - first) >> 32)
        first = end


@jit
def sample(x: Floats, old: Floats, carried: bool, found: Words) -> None:
    """Magnitudes at about equal distances."""
    step = max(1, len(x) // max(1, len(found)))
    for j in range(len(found)):
        i = j * step
        found[j] = simd.as_bits(x[i] + old[i] if carried else x[i]) & MAGNITUDE


@jit
def moved_sample(g: Floats, factor: Scalar, old: Floats, nesterov: bool, residual: Floats, found: Words) -> None:
    """The same of what :func:`moved_candidates` makes."""
    step = max(1, len(g) // max(1, len(found)))
    for j in range(len(found)):
        i = j * step
        moved = old[i] * factor + g[i]
        found[j] = simd.as_bits(residual[i] + (moved * factor + g[i] if nesterov else moved)) & MAGNITUDE


@jit
def moved_candidates(
    g: Floats, factor: Scalar, old: Floats, u: Floats, nesterov: bool, residual: Floats, v: Floats, least: np.int32,
    places: Places, values: Floats,
) -> Scalar:  # fmt: skip
    """u = factor·old + g; v = residual + u, or residual + (factor·u + g); then as :func:`candidates`."""
    found, step = 0, np.empty(BLOCK, np.float32)
    for first in range(0, len(v), BLOCK):
        part, some, moved = v[first : first + BLOCK], g[first : first + BLOCK], u[first : first + BLOCK]
        _move(some, factor, old[first : first + BLOCK], moved)
        if nesterov:
            _move(some, factor, moved, step[: len(some)])
            moved = step[: len(some)]
        add(moved, residual[first : first + BLOCK], part)
        found = _search(part, first, least, places, values, found)
    return found


@jit
def _move(g: Floats, factor: Scalar, old: Floats, u: Floats) -> None:
    """u = factor·old + g."""
    whole = len(g) // simd.WIDTH * simd.WIDTH
    for i in range(0, whole, simd.WIDTH):
        simd.move(g, factor, old, u, i)
    for i in range(whole, len(g)):
        u[i] = old[i] * factor + g[i]


@jit
def candidates(
    x: Floats, old: Floats, v: Floats, carried: bool, least: np.int32, places: Places, values: Floats, start: int,
    found: int,
) -> Scalar:  # fmt: skip
    """Where the magnitude is ``least`` or more, ascending, and the values there.

    ``v`` is x itself, or (``carried``) takes x + old, to the end in any case.

    Args:
        start: place of the first of these values.
        found: how many there were before it.

    Returns:
        How many there are by now, which may be more than there is room for.
    """
    for first in range(0, len(v), BLOCK):
        part = v[first : first + BLOCK]
        if carried:
            add(x[first : first + BLOCK], old[first : first + BLOCK], part)
        found = _search(part, start + first, least, places, values, found)
    return found


@jit
def _search(part: Floats, first: int, least: np.int32, places: Places, values: Floats, found: int) -> Scalar:
    """How many have been found up to the end of this part; those for which there is room are noted down."""
    bits = part.view(np.int32)
    for at in range(0, len(part), 64):
        word = _not_less(bits, at, least)
        while word:
            i = at + np.int64(simd.lowest(word))
            if found < len(places):
                places[found], values[found] = first + i, part[i]
            found += 1
            word &= word - np.uint64(1)
    return found


@jit
def _not_less(bits: Words, at: int, least: np.int32) -> Scalar:
    if at + 64 <= len(bits):
        return simd.magnitude_at_least(bits, at, least)
    word = np.uint64(0)
    for k in range(len(bits) - at):
        word |= np.uint64(np.int32(bits[at + k] & MAGNITUDE) >= least) << np.uint64(k)
    return word


@jit
def keep(values: Floats, places: Places, least: np.int32, chosen: Places, kept: Floats) -> None:
    """Values above ``least``, and the first at it: as many as ``chosen`` has room for, less one.

    Args:
        values: the candidates.
        places: theirs; none, if they are all values there are.
        least: the magnitude of the last to be kept.
        chosen: takes their places, and one more value.
        kept: takes the values, and one more.
    """
    bits, some = values.view(np.int32), len(places) > 0
    equal: Scalar = len(chosen) - 1
    for j in range(len(bits)):
        equal -= np.int64(np.int32(bits[j] & MAGNITUDE) > least)
    found: Scalar = 0
    for j in range(len(bits)):
        size = np.int32(bits[j] & MAGNITUDE)
        first = np.int64((size == least) & (equal > 0))
        chosen[found], kept[found] = places[j] if some else j, values[j]
        found += first + np.int64(size > least)  # no branch: half of them are kept, as if by chance
        equal -= first
