"""Every loop of ``Kernels`` with its options turned: how it is called, and how to see that one is the reference's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.slots import Carry
from commlib.compressors.kernels.dispatch import Kernels
from commlib.compressors.kernels.reference import codecs


@dataclasses.dataclass(frozen=True)
class Loop:
    """A pair of loops: ``encode(kernels, x, payload, carry)`` and ``decode(kernels, payloads, out, add, scale)``."""

    nbytes: Callable[[int], int]
    encode: Callable[[Kernels, Tensor, Tensor, Carry | None], None]
    decode: Callable[[Kernels, Tensor, Tensor, bool, float], None]
    wire: torch.dtype = torch.uint8  # of the payload, if all of it is of one
    head: Callable[[int], int] = lambda n: 0  # bytes of float32 that such a payload begins with


def two_means(column: int) -> Loop:
    return Loop(
        lambda n: 8 * -(-n // column) + -(-n // 8),
        lambda k, x, payload, carry: k.two_means_encode(x, payload, column, carry),
        lambda k, payloads, out, add, scale: k.two_means_decode(payloads, out, column, add=add, scale=scale),
        head=lambda n: 8 * -(-n // column),
    )


def sign() -> Loop:
    return Loop(
        lambda n: 4 + -(-n // 8) if n else 0,
        lambda k, x, payload, carry: k.sign_encode(x, payload, carry),
        lambda k, payloads, out, add, scale: k.sign_decode(payloads, out, add=add, scale=scale),
        head=lambda n: 4 if n else 0,
    )


def levels(block: int, top: int, seed: int | None = None) -> Loop:
    def encode(k: Kernels, x: Tensor, payload: Tensor, carry: Carry | None) -> None:
        if seed is None:
            k.linear_encode(x, payload, block, top, carry)
        else:
            k.norm_encode(x, payload, block, top, seed, carry)

    return Loop(
        lambda n: 4 * -(-n // block) + -(-n * (2 * top).bit_length() // 8),
        encode,
        lambda k, payloads, out, add, scale: k.levels_decode(payloads, out, block, top, add=add, scale=scale),
        head=lambda n: 4 * -(-n // block),
    )


def ternary(block: int, seed: int) -> Loop:
    return Loop(
        lambda n: 4 * -(-n // block) + -(-n // 5),
        lambda k, x, payload, carry: k.ternary_encode(x, payload, block, seed, carry),
        lambda k, payloads, out, add, scale: k.ternary_decode(payloads, out, block, add=add, scale=scale),
        head=lambda n: 4 * -(-n // block),
    )


def natural(seed: int) -> Loop:
    return Loop(
        lambda n: 4 + n if n else 0,
        lambda k, x, payload, carry: k.natural_encode(x, payload, seed, carry),
        lambda k, payloads, out, add, scale: k.natural_decode(payloads, out, add=add, scale=scale),
        head=lambda n: 4 if n else 0,
    )


def shorter(wire: torch.dtype) -> Loop:
    return Loop(
        lambda n: 2 * n,
        lambda k, x, payload, carry: k.cast_encode(x, payload, wire, carry),
        lambda k, payloads, out, add, scale: k.cast_decode(payloads, out, wire, add=add, scale=scale),
        wire,
    )


LOOPS = {
    "fp16": shorter(torch.float16),
    "bf16": shorter(torch.bfloat16),
    "two means, column 256": two_means(256),
    "two means, column 300": two_means(300),
    "two means, column 1024": two_means(1024),
    "two means, column 1025": two_means(1025),
    "two means, column 2048": two_means(2048),
    "two means, column 8200": two_means(8200),
    "two means, one column": two_means(1 << 20),
    "sign": sign(),
    "int8": levels(256, 127),
    "int8, block 48": levels(48, 127),
    "int4": levels(64, 7),
    "int4, odd blocks": levels(33, 7),
    "3 bits": levels(100, 3),
    "11 bits": levels(5000, 1000),
    "qsgd": levels(512, 7, seed=77),
    "qsgd, block 2000": levels(2000, 7, seed=78),
    "qsgd, 16 bits": levels(100, 32767, seed=2**63),
    "qsgd, 1 level": levels(5000, 1, seed=0),
    "ternary": ternary(1 << 20, seed=5),
    "ternary, block 100": ternary(100, seed=6),
    "natural": natural(seed=9),
}

LENGTHS = st.one_of(st.sampled_from([0, 1, 63, 64, 65, 1023, 1024, 1025, 2560, 2561, 4096, 9001]), st.integers(0, 6000))


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    """Float32 of one of many lengths and sizes: zeros of both signs, ties, subnormals, huge, NaN and infinities."""
    n = draw(LENGTHS)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(n + 3, generator=generator)
    match draw(st.sampled_from(["plain", "many sizes", "zero", "ties", "subnormal", "huge", "NaN", "infinite"])):
        case "many sizes":
            x *= 10 ** (torch.rand(n + 3, generator=generator) * 70 - 42)
        case "zero":
            x *= 0
        case "ties":
            x = x.round()
        case "subnormal":
            x *= 1e-43
        case "huge":
            x *= 1e38
        case "NaN":
            x[torch.rand(n + 3, generator=generator) < 0.01] = torch.nan
        case "infinite":
            x[torch.rand(n + 3, generator=generator) < 0.01] = draw(st.sampled_from([torch.inf, -torch.inf]))
    start = draw(st.integers(0, 3))  # a view at any boundary
    return x[start : start + n]


def same(a: Any, b: Any) -> bool:
    """To the last bit, but that all NaN are one: their bits are the processor's own."""
    if a.is_floating_point():
        hidden = a.isnan() & b.isnan()
        words = torch.int16 if a.dtype.itemsize == 2 else torch.int32
        a, b = a.masked_fill(hidden, 0).view(words), b.masked_fill(hidden, 0).view(words)
    return torch.equal(a, b)


PLAIN = cast(Kernels, codecs)
UP = 40503
CARRIED = (None, torch.float32, torch.bfloat16)
"""Formats of residuals, and none."""


def _moved(x: Tensor, device: str) -> Tensor:
    """The same view of memory of another device."""
    if device == "cpu":
        return x
    return torch.empty(x.storage_offset() + len(x), dtype=x.dtype, device=device)[x.storage_offset() :].copy_(x)


def encoded(
    kernels: Kernels, loop: Loop, x: Tensor, old: Tensor | None, device: str = "cpu", *, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """(payload, what was not sent, in the format of ``old``)."""
    payload = torch.full((loop.nbytes(len(x)),), 9, dtype=torch.uint8, device=device)
    there, kept = _moved(x, device), torch.full_like(x if old is None else old, 7, device=device)
    carry = None
    if old is not None:
        first = kept.copy_(old) if in_place else _moved(old, device)
        carry = Carry(first, kept, UP)
    loop.encode(kernels, there, payload, carry)
    assert same(there.cpu(), x)
    return payload.cpu(), kept.cpu()


def check_encoding(
    kernels: Kernels, loop: Loop, x: Tensor, carried: torch.dtype | None, device: str = "cpu", *, in_place: bool = False
) -> None:
    """It encodes what the reference does, keeps what that keeps, and leaves x as it is.

    ``carried``: format of the residual, if there is one.
    """
    old = None if carried is None else torch.linspace(-1, 1, len(x)).to(carried)
    before = x.clone()
    payload, kept = encoded(kernels, loop, x, old, device, in_place=in_place)
    wanted, left = encoded(PLAIN, loop, before, old)
    head = loop.head(len(x))
    assert same(payload[:head].view(torch.float32), wanted[:head].view(torch.float32))
    assert same(payload[head:].view(loop.wire), wanted[head:].view(loop.wire))
    assert same(kept, left)


def check_decoding(
    kernels: Kernels, loop: Loop, x: Tensor, ranks: int, add: bool, scale: float, device: str = "cpu"
) -> None:
    """It adds up what the reference decodes of several ranks' payloads, whose rows are longer than they are."""
    need = loop.nbytes(len(x))
    payloads = torch.zeros(ranks, -(-need // 8) * 8 + 8, dtype=torch.uint8)[:, :need]
    for p, row in enumerate(payloads):
        row.copy_(encoded(PLAIN, loop, x * (p - 0.5), None)[0])
    wanted, values = torch.linspace(-1, 1, len(x)), torch.linspace(-1, 1, len(x) + 3)
    values[1 : len(x) + 1] = wanted
    rows, out = torch.zeros(ranks, -(-need // 8) * 8 + 8, dtype=torch.uint8, device=device), values.to(device)
    rows[:, :need] = payloads
    loop.decode(kernels, rows[:, :need], out[1 : len(x) + 1], add, scale)
    loop.decode(PLAIN, payloads, wanted, add, scale)
    assert same(out.cpu()[1 : len(x) + 1], wanted)
    assert same(out.cpu()[len(x) + 1 :], values[len(x) + 1 :])
