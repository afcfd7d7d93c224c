"""The codecs' loops for CPU tensors, compiled. Each function is the one of ``reference`` with its name, and equals it.

Any number of threads may run them at a time; they use one core each, and not the GIL.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from commlib.codecs import residuals
from commlib.codecs.slots import Carry
from commlib.compressors.kernels.cpu import bitpack, cast, householder, microscaling, natural, onebit, simd
from commlib.compressors.kernels.cpu import quantize as _levels
from commlib.compressors.kernels.cpu import topk as _largest
from commlib.compressors.kernels.cpu.jit import Bytes, Floats, Places, Words
from commlib.compressors.kernels.reference import codecs
from commlib.compressors.kernels.reference.bitpack import fields_nbytes, low_bits
from commlib.compressors.kernels.reference.random import key
from commlib.runtime.scratch import scratch

name = "numba"
_HALF = cast.has_half()
_CPU = torch.device("cpu")
_TILE = 1 << 15  # values
residuals.compiled["cpu"] = microscaling.CompiledLoops()


def cast_encode(x: Tensor, payload: Tensor, wire: torch.dtype, carry: Carry | None = None) -> None:
    """See ``reference``; the bits of a NaN may differ."""
    brain = wire == torch.bfloat16
    if carry is None or not (brain or _HALF):  # without one torch's own loop is as good
        codecs.cast_encode(x, payload, wire, carry)
    else:
        shorts = payload.numpy().view(np.uint16)
        for first, last, arrays in _tiles(x, carry, 1):
            cast.cast_encode(*arrays, shorts[first:last], brain)


def cast_decode(payloads: Tensor, out: Tensor, wire: torch.dtype, *, add: bool, scale: float) -> None:
    """Same as ``reference.codecs.cast_decode``, by numba."""
    brain = wire == torch.bfloat16
    if not (brain or _HALF):
        codecs.cast_decode(payloads, out, wire, add=add, scale=scale)
    else:
        cast.cast_decode(payloads.numpy().view(np.uint16), out.numpy(), brain, add, scale)


def two_means_encode(x: Tensor, payload: Tensor, column: int, carry: Carry | None = None) -> None:
    """Same as ``reference.codecs.two_means_encode``, by numba."""
    if x.numel():
        means, bits = _parts(payload, 8 * -(-x.numel() // column))
        past = column % 16 == 0 and column <= onebit.HELD and carry is not None and _leaves(carry)
        for first, last, arrays in _tiles(x, carry, column):
            some = means[2 * (first // column) : 2 * -(-last // column)]
            onebit.two_means_encode(*arrays, some, bits[first // 8 : -(-last // 8)], column, past)


def two_means_decode(payloads: Tensor, out: Tensor, column: int, *, add: bool, scale: float) -> None:
    """Same as ``reference.codecs.two_means_decode``, by numba."""
    if out.numel():
        means, bits = _parts(payloads, 8 * -(-out.numel() // column))
        onebit.two_means_decode(means, bits, out.numpy(), column, add, scale, _past(out))


def sign_encode(x: Tensor, payload: Tensor, carry: Carry | None = None) -> None:
    """Same as ``reference.codecs.sign_encode``, by numba."""
    for _, _, arrays in _tiles(x, carry, x.numel()):
        onebit.sign_encode(*arrays, *_parts(payload, 4))


def sign_decode(payloads: Tensor, out: Tensor, *, add: bool, scale: float) -> None:
    """Same as ``reference.codecs.sign_decode``, by numba."""
    if out.numel():
        onebit.sign_decode(*_parts(payloads, 4), out.numpy(), add, scale, _past(out))


def linear_encode(x: Tensor, payload: Tensor, block: int, levels: int, carry: Carry | None = None) -> None:
    """Same as ``reference.codecs.linear_encode``, by numba."""
    scales, fields = _parts(payload, 4 * -(-x.numel() // block))
    width = (2 * levels).bit_length()
    for first, last, arrays in _tiles(x, carry, block):
        some, those = scales[first // block : -(-last // block)], fields[first * width // 8 : -(-last * width // 8)]
        _levels.linear_encode(*arrays, some, those, block, levels, width)


def norm_encode(x: Tensor, payload: Tensor, block: int, levels: int, seed: int, carry: Carry | None = None) -> None:
    """Same as ``reference.codecs.norm_encode``, by numba."""
    scales, fields = _parts(payload, 4 * -(-x.numel() // block))
    width = (2 * levels).bit_length()
    for _, _, arrays in _tiles(x, carry, x.numel()):
        _levels.norm_encode(*arrays, scales, fields, block, levels, width, *_words(seed))


def levels_decode(payloads: Tensor, out: Tensor, block: int, levels: int, *, add: bool, scale: float) -> None:
    """Same as ``reference.codecs.levels_decode``, by numba."""
    scales, fields = _parts(payloads, 4 * -(-out.numel() // block))
    _levels.levels_decode(scales, fields, out.numpy(), block, levels, (2 * levels).bit_length(), add, scale)


def ternary_encode(x: Tensor, payload: Tensor, block: int, seed: int, carry: Carry | None = None) -> None:
    """Same as ``reference.codecs.ternary_encode``, by numba."""
    scales, trits = _parts(payload, 4 * -(-x.numel() // block))
    for _, _, arrays in _tiles(x, carry, x.numel()):
        _levels.ternary_encode(*arrays, scales, trits, block, *_words(seed))


def ternary_decode(payloads: Tensor, out: Tensor, block: int, *, add: bool, scale: float) -> None:
    """Same as ``reference.codecs.ternary_decode``, by numba."""
    scales, trits = _parts(payloads, 4 * -(-out.numel() // block))
    _levels.ternary_decode(scales, trits, out.numpy(), block, add, scale)


def natural_encode(x: Tensor, payload: Tensor, seed: int, carry: Carry | None = None) -> None:
    """Same as ``reference.codecs.natural_encode``, by numba."""
    for _, _, arrays in _tiles(x, carry, x.numel()):
        natural.natural_encode(*arrays, *_parts(payload, 4), *_words(seed))


def natural_decode(payloads: Tensor, out: Tensor, *, add: bool, scale: float) -> None:
    """Same as ``reference.codecs.natural_decode``, by numba."""
    if out.numel():
        scale_of, codes = _parts(payloads, 4)
        natural.natural_decode(scale_of, codes, out.numpy(), add, scale)


def places_encode(indices: Tensor, n: int, payload: Tensor) -> None:
    """Same as ``reference.bitpack.elias_fano_encode``, by numba."""
    low, k = low_bits(n, len(indices)), len(indices)
    whole, head = payload.numpy(), fields_nbytes(k, low)
    bitpack.encode(indices.numpy(), low, whole[:head], whole[head:])


def places_decode(payload: Tensor, n: int, k: int) -> Tensor:
    """Same as ``reference.bitpack.elias_fano_decode``, by numba."""
    low, places = low_bits(n, k), np.empty(k, np.int64)
    whole, head = payload.numpy(), fields_nbytes(k, low)
    bitpack.decode(whole[:head], whole[head:], low, n, places)
    return torch.from_numpy(places)


def places_add(payload: Tensor, values: Tensor, scale: float, out: Tensor) -> None:
    """Same as ``reference.codecs.places_add``, by numba."""
    n, k = out.numel(), values.numel()
    low, whole = low_bits(n, k), payload.numpy()
    head = fields_nbytes(k, low)
    bitpack.add(whole[:head], whole[head:], low, values.numpy(), np.float32(scale), out.numpy())


def largest(x: Tensor, k: int, carry: Carry | None = None) -> tuple[Tensor, Tensor]:
    """Same as ``reference.codecs.largest``, by numba."""
    n, count = x.numel(), 0
    room, found, at = _expected(n, k)
    if carry is not None and carry.short and carry.old.data_ptr() == carry.new.data_ptr():
        carry = carry._replace(old=carry.old.clone())  # it may be read again
    xs, olds, _, carried = _joined(*_sampled(x, carry, len(found)))
    _largest.sample(xs, olds, carried, found)
    guess = np.partition(found, at)[at] if k else np.int32(0)
    places, values = _room(room)
    for first, _, arrays in _tiles(x, carry, 1):
        count = _largest.candidates(*arrays, guess, places, values, first, count)
    if k <= count <= room:
        return _exactly(k, places[:count], values[:count])
    return _exactly(k, places[:0], _whole(x, carry))


def largest_moved(
    g: Tensor, k: int, m: float, old: Tensor, u: Tensor, carry: Carry, *, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """Same as ``reference.codecs.largest_moved``, by numba."""
    gs, olds, us, residual, v = (t.view(-1).numpy() for t in (g, old, u, carry.old, carry.new))
    factor, (room, found, at) = np.float32(m), _expected(len(v), k)
    _largest.moved_sample(gs, factor, olds, nesterov, residual, found)
    guess = np.partition(found, at)[at] if k else np.int32(0)
    places, values = _room(room)
    count = _largest.moved_candidates(gs, factor, olds, us, nesterov, residual, v, guess, places, values)
    enough = k <= count <= room
    return _exactly(k, places[: count if enough else 0], values[:count] if enough else v)


def orthonormal(p: Tensor, spare: Tensor) -> None:
    """Same as ``reference.codecs.orthonormal``, by numba."""
    m, r = p.shape
    room = (scratch(what, shape, torch.float64, _CPU).numpy() for what, shape in _panel(m, r))
    householder.orthonormal(p.numpy(), spare.numpy(), *room)


def _panel(m: int, r: int) -> list[tuple[str, tuple[int, ...]]]:
    """Shapes of the memory that it holds meanwhile."""
    return [("panel", (r, m)), ("scales", (r,)), ("sums", (-(-m // onebit.BLOCK),)), ("half", (onebit.HALF,))]


def strata(n: int, k: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """See ``reference``; good until this thread asks again."""
    both = scratch("strata", (2, k), torch.int64, device)
    _largest.strata(n, *_words(seed), *both.numpy())
    return both[0], both[1]


def _room(n: int) -> tuple[Places, Floats]:
    """Room for n candidates, until this thread asks again."""
    places, values = (scratch("candidates", (n,), dtype, _CPU) for dtype in (torch.int64, torch.float32))
    return places.numpy(), values.numpy()


def _expected(n: int, k: int) -> tuple[int, Words, int]:
    """(room for the candidates, for a sample, whose value of what rank to take) so that there are k, as a rule."""
    found = np.empty(min(n, max(1024, min(n // 64, _largest.SAMPLE))), np.int32)
    share = k * len(found) / max(1, n)
    spare = 4 * share**0.5 + 4  # four standard deviations
    room = min(n, math.ceil((share + 2 * spare + 8) * n / max(1, len(found))))
    return room, found, max(0, len(found) - math.ceil(share + spare))


def _exactly(k: int, places: Places, values: Floats) -> tuple[Tensor, Tensor]:
    """The k largest of the values at these places, or if there are none, of values that are all there are."""
    chosen, kept = np.empty(k + 1, np.int64), np.empty(k + 1, np.float32)
    if k:
        sizes = values.view(np.int32) & _levels.MAGNITUDE
        _largest.keep(values, places, np.partition(sizes, len(sizes) - k)[len(sizes) - k], chosen, kept)
    return torch.from_numpy(chosen[:k]), torch.from_numpy(kept[:k])


def _sampled(x: Tensor, carry: Carry | None, count: int) -> tuple[Tensor, Carry | None]:
    """Values and carry that a sample of so many is taken of; of a short carry only these are widened."""
    if carry is None or not carry.short:
        return x, carry
    step = max(1, len(x) // max(1, count))
    held = carry.old.view(-1)[::step][:count].float()
    return x[::step][:count].contiguous(), Carry(held, held)


def _whole(x: Tensor, carry: Carry | None) -> Floats:
    """All values that were to be encoded, once they have been."""
    if carry is None:
        return typing.cast(Floats, x.numpy())
    return typing.cast(Floats, (x + carry.old.view(-1) if carry.short else carry.new.view(-1)).numpy())


Arrays = tuple[Floats, Floats, Floats, bool]


def _tiles(x: Tensor, carry: Carry | None, unit: int) -> Iterator[tuple[int, int, Arrays]]:
    """The values as the loops take them: (first, last, arrays), all of them at once.

    With a short carry a part at a time, which stays in a cache while it is widened, encoded, and shortened: a multiple
    of ``unit`` values and of whole bytes of packed numbers.
    """
    n = len(x)
    if n == 0:
        return
    if carry is None or not carry.short:
        yield 0, n, _joined(x, carry)
        return
    blocks = carry.new.dtype == torch.int8
    least = math.lcm(unit, residuals.BLOCK if blocks else 8)
    span = min(n, least * max(1, _TILE // least))
    xs, room = x.numpy(), scratch("tile", (span,), torch.float32, _CPU).numpy()
    if blocks:
        old, width = microscaling.flat(carry.old)
        new, _ = microscaling.flat(carry.new)
    else:
        shorts, left = (held.view(-1).view(torch.int16).numpy().view(np.uint16) for held in (carry.old, carry.new))
    for first in range(0, n, span):
        last = min(n, first + span)
        tile = room[: last - first]
        if blocks:
            microscaling.widen(old, width, first, tile, False)
        else:
            cast.cast_decode(shorts[None, first:last], tile, True, False, 1.0)  # widened
        yield first, last, (xs[first:last], tile, tile, True)
        if blocks:
            microscaling.shorten(tile, new, width, first, carry.up)
        else:
            cast.shorten(tile, left[first:last], carry.up)


def _joined(x: Tensor, carry: Carry | None) -> Arrays:
    """(x, old, v, carried), as the loops take them: without a carry ``v`` is x, and ``old`` not read."""
    xs = x.numpy()
    return (xs, xs, xs, False) if carry is None else (xs, carry.old.view(-1).numpy(), carry.new.view(-1).numpy(), True)


def _leaves(carry: Carry) -> bool:
    """Whether what is not sent is written past the caches: not where they hold it already."""
    return not carry.short and carry.old.data_ptr() != carry.new.data_ptr() and _past(carry.new)


def _past(written: Tensor) -> bool:
    """Whether it is written past the caches: it is out of them when it is read again, and begins with a line."""
    return written.numel() > onebit.PAST and written.data_ptr() % simd.LINE == 0


def _parts(payload: Tensor, head: int) -> tuple[Floats, Bytes]:
    """A payload's float32 head, and the rest; of several payloads, those of all."""
    both = payload.numpy()
    return both[..., :head].view(np.float32), both[..., head:]


def _words(seed: int) -> tuple[np.uint32, np.uint32]:
    low, high = key(seed)
    return np.uint32(low), np.uint32(high)
