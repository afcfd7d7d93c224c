"""Packing of small whole numbers into bytes: fields of b bits, base-3 digits, sorted indices.

All of it without a loop over values and without asking the device for a number: sizes follow from
the arguments, never from the data. Payloads are uint8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_GATHER = 0x0102040810204080
_COPIES = 0x0101010101010101
_ONE_BIT_EACH = 0x8040201008040201 - (1 << 64)  # as a signed number

# -- fields of b bits ---------------------------------------------------------------------------


def pack_bits(bits: Tensor) -> Tensor:
    """Booleans, shape (n,) → uint8, shape (⌈n/8⌉,); value i is bit i mod 8 of byte i div 8."""
    eight = _words(bits.view(torch.uint8))
    # eight bytes of 0 or 1 in one multiplication: byte i moves to bit 56 + i, and no two meet
    return ((eight * _GATHER >> 56) & 255).to(torch.uint8)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """The inverse of :func:`pack_bits`: booleans, shape (n,)."""
    # the byte eight times over, of which copy i keeps bit i
    eight = (packed.to(torch.int64) * _COPIES) & _ONE_BIT_EACH
    return eight.view(torch.uint8)[:n] != 0


def _words(x: Tensor) -> Tensor:
    """Bytes, shape (n,), zero-padded and seen as int64, shape (⌈n/8⌉,); little-endian, as all that torch runs on."""
    pad = -x.numel() % 8
    if pad:
        x = F.pad(x, (0, pad))
    elif x.storage_offset() % 8:
        x = x.clone()
    return x.view(torch.int64)


def fields_nbytes(n: int, bits: int) -> int:
    """Bytes of n fields."""
    return -(-n * bits // 8)


def pack_fields(values: Tensor, bits: int) -> Tensor:
    """Whole numbers in [0, 2^bits), shape (n,) → uint8, shape (⌈n·bits/8⌉,), for 0 ≤ bits ≤ 48.

    One little-endian stream: bit j of value i is bit (i·bits + j) mod 8 of byte (i·bits + j) div 8.
    """
    if bits == 8:
        return values.to(torch.uint8)
    n = values.numel()
    # eight fields fill exactly `bits` bytes, so every group of eight is laid out alike
    group = F.pad(values.to(_work_dtype(bits)), (0, -n % 8)).view(-1, 8)
    packed = torch.zeros(group.shape[0], bits, dtype=torch.uint8, device=values.device)
    for field, byte, shift in _overlaps(bits):
        part = group[:, field] << shift if shift >= 0 else group[:, field] >> -shift
        packed[:, byte] |= (part & 255).to(torch.uint8)
    return packed.view(-1)[: fields_nbytes(n, bits)]


def unpack_fields(packed: Tensor, n: int, bits: int) -> Tensor:
    """The inverse of :func:`pack_fields`: shape (n,), int32 (int64 for more than 16 bits)."""
    dtype = _work_dtype(bits)
    if bits == 8:
        return packed.to(dtype)
    groups = -(-n // 8)
    source = F.pad(packed, (0, groups * bits - packed.numel())).view(groups, bits)
    values = torch.zeros(groups, 8, dtype=dtype, device=packed.device)
    for field, byte, shift in _overlaps(bits):
        part = source[:, byte].to(dtype)
        values[:, field] |= part >> shift if shift >= 0 else part << -shift
    return (values & ((1 << bits) - 1)).view(-1)[:n]


def _overlaps(bits: int) -> list[tuple[int, int, int]]:
    """(field, byte, left shift of the field into the byte) for each field and byte of a group that overlap."""
    return [
        (field, byte, field * bits - 8 * byte)
        for field in range(8)
        for byte in range(field * bits // 8, -(-(field + 1) * bits // 8))
    ]


def _work_dtype(bits: int) -> torch.dtype:
    return torch.int32 if bits <= 16 else torch.int64  # a field and a byte must fit side by side


# -- base 3 -------------------------------------------------------------------------------------


def pack_trits(trits: Tensor) -> Tensor:
    """Digits 0, 1, 2, shape (n,) → uint8, shape (⌈n/5⌉,): five to a byte, the first has weight 1 (3⁵ = 243)."""
    digits = F.pad(trits.to(torch.uint8), (0, -trits.numel() % 5)).view(-1, 5)
    packed = digits[:, 4].clone()
    for place in (3, 2, 1, 0):
        packed.mul_(3).add_(digits[:, place])
    return packed


def unpack_trits(packed: Tensor, n: int) -> Tensor:
    """The inverse of :func:`pack_trits`: uint8, shape (n,)."""
    return torch.stack([packed.div(3**i, rounding_mode="floor") % 3 for i in range(5)], dim=1).view(-1)[:n]


# -- sorted indices: Elias–Fano -----------------------------------------------------------------


def elias_fano_nbytes(n: int, k: int) -> int:
    """Exact bytes of k indices below n: about 2 + log₂(n/k) bits each."""
    return fields_nbytes(k, low_bits(n, k)) + _upper_length(n, k) if k else 0


def elias_fano_encode(indices: Tensor, n: int, payload: Tensor) -> None:
    """Code ascending distinct indices (Elias 1974, Fano 1971).

    The lowest l = ⌊log₂(n/k)⌋ bits of each are fields of l bits; the rest, h_i, never decreases and
    is a vector of k + ⌊n/2^l⌋ + 1 bits in which bit h_i + i is set.

    Args:
        indices: int64, shape (k,) with 1 ≤ k ≤ n, in [0, n).
        n: how many places there are.
        payload: uint8, shape (elias_fano_nbytes(n, k),), overwritten.
    """
    k = indices.numel()
    low = low_bits(n, k)
    head = fields_nbytes(k, low)
    payload[:head].copy_(pack_fields(indices & ((1 << low) - 1), low))
    places = (indices >> low) + torch.arange(k, device=indices.device)
    bits = torch.zeros(8 * _upper_length(n, k), dtype=torch.uint8, device=indices.device)
    payload[head:].copy_(pack_bits(bits.scatter_(0, places, 1)))


def elias_fano_decode(payload: Tensor, n: int, k: int) -> Tensor:
    """The inverse: int64, shape (k,), within [0, n) whatever the bytes are."""
    low = low_bits(n, k)
    head = fields_nbytes(k, low)
    bits = unpack_bits(payload[head:], 8 * _upper_length(n, k))
    # the i-th set bit writes its place into cell i; all clear bits (and any beyond k) write into a spare cell
    cell = torch.where(bits, bits.cumsum(0) - 1, k).clamp_(max=k)
    places = torch.zeros(k + 1, dtype=torch.int64, device=payload.device)
    places.scatter_(0, cell, torch.arange(bits.numel(), device=payload.device))
    upper = places[:k] - torch.arange(k, device=payload.device)
    return ((upper << low) | unpack_fields(payload[:head], k, low)).clamp_(0, n - 1)


def low_bits(n: int, k: int) -> int:
    return (n // k).bit_length() - 1


def _upper_length(n: int, k: int) -> int:
    """Bytes of the bit vector."""
    return -(-(k + (n >> low_bits(n, k)) + 1) // 8)
