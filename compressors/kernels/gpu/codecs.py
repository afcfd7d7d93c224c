"""The codecs' loops for CUDA tensors, compiled by Triton. Each function is the one of ``reference`` with its name.

It equals that to the last bit, but for :func:`orthonormal`. Nothing synchronises with the host, and shapes follow from
sizes alone. Most codecs take one pass over memory; one more comes first where a block, or a column, does not fit into a
program or its packed numbers not into whole bytes.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from commlib.codecs import residuals
from commlib.codecs.slots import Carry
from commlib.compressors.kernels.gpu import block_statistics, cast, microscaling, onebit, quantize
from commlib.compressors.kernels.gpu.jit import interpreted, launch
from commlib.compressors.kernels.gpu.places import largest, largest_moved, places_add, places_decode, places_encode
from commlib.compressors.kernels.gpu.tiles import BLOCK, MOST, cut, packing
from commlib.compressors.kernels.reference.codecs import inverse, strata
from commlib.compressors.kernels.reference.random import key

__all__ = [
    "cast_decode", "cast_encode", "interpreted", "largest", "largest_moved", "levels_decode", "linear_encode", "name",
    "natural_decode", "natural_encode", "norm_encode", "orthonormal", "places_add", "places_decode", "places_encode",
    "sign_decode", "sign_encode", "strata", "ternary_decode", "ternary_encode", "two_means_decode", "two_means_encode",
]  # fmt: skip

name = "triton"
_COLUMN = 8 * BLOCK  # the longest column that one program takes
LANES = 128  # values that a warp reads at once
_REGISTERS = 80  # of a thread with a column: three programs of eight warps run at a time
_TRITS = 256  # bytes of them of a program
residuals.compiled["cuda"] = microscaling.TritonLoops()


def cast_encode(x: Tensor, payload: Tensor, wire: torch.dtype, carry: Carry | None = None) -> None:
    """See ``reference``; the bits of a NaN may differ."""
    n = x.numel()
    if n:
        old, new, up, carried = _carried(x, carry)
        args, brain = (x, old, new, up, payload, n), wire == torch.bfloat16
        launch(cast.cast_encode, -(-n // MOST), x, *args, CARRIED=carried, BRAIN=brain, WIDTH=MOST)


def cast_decode(payloads: Tensor, out: Tensor, wire: torch.dtype, *, add: bool, scale: float) -> None:
    """Same as ``reference.codecs.cast_decode``, in Triton."""
    n = out.numel()
    if n:
        args, brain = (payloads, payloads.stride(0), len(payloads), out, n, scale), wire == torch.bfloat16
        launch(cast.cast_decode, -(-n // MOST), out, *args, ADD=add, BRAIN=brain, WIDTH=MOST)


def two_means_encode(x: Tensor, payload: Tensor, column: int, carry: Carry | None = None) -> None:
    """Same as ``reference.codecs.two_means_encode``, in Triton."""
    n = x.numel()
    if not n:
        return
    old, new, up, carried = _carried(x, carry)
    columns = -(-n // column)
    args = (x, old, new, up, payload, 8 * columns, payload.numel() - 8 * columns, n, column)
    if column <= _COLUMN and (column % 8 == 0 or columns == 1):
        width = min(BLOCK, max(64, triton.next_power_of_2(column)))
        parts = triton.next_power_of_2(-(-column // width))
        several = max(1, 4 * BLOCK // (width * parts))
        launch(
            onebit.columns_encode, -(-columns // several), x, *args, warps=max(4, parts), registers=_REGISTERS,
            CARRIED=carried, COLUMNS=several, PARTS=parts, CHUNKS=max(1, width // LANES), LANES=min(width, LANES),
        )  # fmt: skip
    else:
        sums, counts = block_statistics.sides(x, old, carried, column)
        tiles = cut(n, column, grain=8)
        more = (tiles.chunks, sums, counts, columns)
        launch(onebit.sides_encode, tiles.programs, x, *args, *more, CARRIED=carried, **tiles.shape)


def two_means_decode(payloads: Tensor, out: Tensor, column: int, *, add: bool, scale: float) -> None:
    """Same as ``reference.codecs.two_means_decode``, in Triton."""
    if out.numel():
        head = 8 * -(-out.numel() // column)
        _signs_decode(payloads, head, out, column, add=add, scale=scale, signs=False)


def sign_encode(x: Tensor, payload: Tensor, carry: Carry | None = None) -> None:
    """Same as ``reference.codecs.sign_encode``, in Triton."""
    n = x.numel()
    if n:
        old, new, up, carried = _carried(x, carry)
        tiles = cut(n, n, grain=8)
        args = (
            x,
            old,
            new,
            up,
            payload,
            payload.numel() - 4,
            n,
            tiles.chunks,
            block_statistics.sizes(x, old, carried),
            float(n),
        )
        launch(onebit.signs_encode, tiles.programs, x, *args, CARRIED=carried, **tiles.shape)


def sign_decode(payloads: Tensor, out: Tensor, *, add: bool, scale: float) -> None:
    """Same as ``reference.codecs.sign_decode``, in Triton."""
    if out.numel():
        _signs_decode(payloads, 4, out, out.numel(), add=add, scale=scale, signs=True)


def _signs_decode(
    payloads: Tensor, head: int, out: Tensor, column: int, *, add: bool, scale: float, signs: bool
) -> None:
    n = out.numel()
    tiles = cut(n, column)
    ranks, nbytes = payloads.shape
    args = (payloads, payloads.stride(0), ranks, head, nbytes - head, out, n, column, tiles.chunks, scale)
    launch(onebit.decode, tiles.programs, out, *args, ADD=add, SIGNS=signs, **tiles.shape)


def linear_encode(x: Tensor, payload: Tensor, block: int, levels: int, carry: Carry | None = None) -> None:
    """Same as ``reference.codecs.linear_encode``, in Triton."""
    _levels_encode(x, payload, block, levels, None, carry)


def norm_encode(x: Tensor, payload: Tensor, block: int, levels: int, seed: int, carry: Carry | None = None) -> None:
    """Same as ``reference.codecs.norm_encode``, in Triton."""
    _levels_encode(x, payload, block, levels, seed, carry)


def _levels_encode(x: Tensor, payload: Tensor, block: int, levels: int, seed: int | None, carry: Carry | None) -> None:
    n = x.numel()
    if not n:
        return
    old, new, up, carried = _carried(x, carry)
    norm, bits, blocks = seed is not None, packing((2 * levels).bit_length()), -(-n // block)
    tiles = cut(n, block, grain=8)
    known = tiles.FLAT or tiles.chunks > 1 or (norm and tiles.WIDTH > BLOCK)
    largest, squares = x, x  # not read, unless
    if known:
        largest = x.new_empty(blocks, dtype=torch.int32)
        block_statistics.maxima(x, old, carried, block, largest)
    if known and norm:
        squares = block_statistics.squares(x, old, carried, block, largest)
    head = 4 * blocks
    args = (x, old, new, up, payload, head, payload.numel() - head, n, block, tiles.chunks, blocks, float(levels))
    more = (inverse(levels), *_words(seed or 0), largest, squares)
    launch(
        quantize.levels_encode, tiles.programs, x, *args, *more,
        CARRIED=carried, NORM=norm, KNOWN=known, **tiles.shape, **bits.shape,
    )  # fmt: skip


def levels_decode(payloads: Tensor, out: Tensor, block: int, levels: int, *, add: bool, scale: float) -> None:
    """Same as ``reference.codecs.levels_decode``, in Triton."""
    bits = packing((2 * levels).bit_length())
    _levels_decode(payloads, out, block, levels, add, scale, bits.WIDTH_IN_BITS, bits.SPAN)


def ternary_encode(x: Tensor, payload: Tensor, block: int, seed: int, carry: Carry | None = None) -> None:
    """Same as ``reference.codecs.ternary_encode``, in Triton."""
    n = x.numel()
    if n:
        old, new, up, carried = _carried(x, carry)
        blocks = -(-n // block)
        largest = x.new_empty(blocks, dtype=torch.int32)
        block_statistics.maxima(x, old, carried, block, largest)
        nbytes = payload.numel() - 4 * blocks
        args = (x, old, new, up, payload, 4 * blocks, nbytes, n, block, *_words(seed), largest)
        launch(quantize.trits_encode, -(-nbytes // _TRITS), x, *args, CARRIED=carried, BYTES=_TRITS)


def ternary_decode(payloads: Tensor, out: Tensor, block: int, *, add: bool, scale: float) -> None:
    """Same as ``reference.codecs.ternary_decode``, in Triton."""
    _levels_decode(payloads, out, block, 1, add, scale, 0, 0)


def _levels_decode(
    payloads: Tensor, out: Tensor, block: int, levels: int, add: bool, scale: float, bits: int, span: int
) -> None:
    n = out.numel()
    if n:
        tiles, (ranks, nbytes) = cut(n, block), payloads.shape
        head = 4 * -(-n // block)
        args = (payloads, payloads.stride(0), ranks, head, nbytes - head, out, n, block, tiles.chunks)
        more = (levels, inverse(levels), scale)
        launch(quantize.decode, tiles.programs, out, *args, *more, ADD=add, **tiles.shape, BITS=bits, SPAN=span)


def natural_encode(x: Tensor, payload: Tensor, seed: int, carry: Carry | None = None) -> None:
    """Same as ``reference.codecs.natural_encode``, in Triton."""
    n = x.numel()
    if n:
        old, new, up, carried = _carried(x, carry)
        largest = x.new_empty(1, dtype=torch.int32)
        block_statistics.maxima(x, old, carried, n, largest)
        args = (x, old, new, up, payload, n, *_words(seed), largest)
        launch(cast.natural_encode, -(-n // MOST), x, *args, CARRIED=carried, WIDTH=MOST)


def natural_decode(payloads: Tensor, out: Tensor, *, add: bool, scale: float) -> None:
    """Same as ``reference.codecs.natural_decode``, in Triton."""
    n = out.numel()
    if n:
        args = (payloads, payloads.stride(0), len(payloads), out, n, scale)
        launch(cast.natural_decode, -(-n // MOST), out, *args, ADD=add, WIDTH=MOST)


def _words(seed: int) -> tuple[int, int]:
    """The words of a seed's key, as signed: Triton would take a large one for 64 bits, and compile another variant."""
    low, high = ((word ^ 1 << 31) - (1 << 31) for word in key(seed))
    return low, high


def orthonormal(p: Tensor, spare: Tensor) -> None:
    """As ``reference``, but by cuSOLVER, whose bits are its own: the reference would launch hundreds of kernels."""
    given = torch.nan_to_num(p, nan=0.0, posinf=0.0, neginf=0.0)
    absmax = given.abs().amax(0, keepdim=True)
    p.copy_(torch.linalg.qr(torch.where(absmax > 0, given / absmax, spare)).Q)


def _carried(x: Tensor, carry: Carry | None) -> tuple[Tensor, Tensor, int, bool]:
    """(old, new, up, whether there is a carry); without one both are x. Short ones as uint16."""
    if carry is None:
        return x, x, 0, False
    old, new = carry.old.view(-1), carry.new.view(-1)
    if carry.short:
        old, new = old.view(torch.uint16), new.view(torch.uint16)
    return old, new, carry.up, True
