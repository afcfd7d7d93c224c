"""``fixed_float``: a value is a whole number of some bytes, between the smallest and the largest of its message."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from commlib.codecs.filter import Content, Filter, Receiving, Sending
from commlib.errors import ProtocolError

_LARGEST = torch.finfo(torch.float32).max


@dataclasses.dataclass(frozen=True)
class FixedFloat(Filter):
    """Values become codes of ``nbytes`` bytes, rounded up or down at random: unbiased, up to float32's own rounding.

    With s = (x - min)/(max - min)·(2^(8·nbytes) - 2), the code is ⌊s⌋, or one more with probability s - ⌊s⌋: the law of
    ⌊s + U⌋ with U uniform in [0, 1). A bin is (max - min)/(2^(8·nbytes) - 2); no value errs by a whole bin, and with
    values spread evenly the mean squared error is 1/6 bin². Values that are all the same come back exactly.

    Layout: values uint8 (n·nbytes,), each code little-endian; the note is [min, max].

    Fixing float of Li et al. (OSDI 2014). Their released code adds a coin's 0 or 1 to ⌊s⌋ instead, which is biased by
    ½ - (s - ⌊s⌋) and has twice the error.

    Args:
        nbytes: of a code, 1 to 4.
    """

    nbytes: int = 3

    name = "fixed_float"
    reads = frozenset({"values"})
    codes = frozenset({"values"})
    unbiased = True

    def __post_init__(self) -> None:
        if not 1 <= self.nbytes <= 4:
            raise ValueError(f"fixed_float: nbytes must be in [1, 4], got {self.nbytes}")

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << 8 * self.nbytes) - 2

    def sender(self, size: int, seed: int) -> Sending:
        return _Rounding(self, seed)

    def receiver(self, size: int) -> Receiving:
        return _Reading(self, size)


class _Rounding(Sending):
    def __init__(self, options: FixedFloat, seed: int) -> None:
        self._options = options
        self._draws = torch.Generator().manual_seed(seed)

    def encode(self, content: Content) -> Content:
        low, high = _range(content.values)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"fixed_float: a value is not finite: the range is {low} to {high}")
        # in float64: float32 has not as many digits as codes of 4 bytes, and high - low may be more than its largest
        scaled = content.values.double().sub_(low).div_((high - low) or 1.0).mul_(self._options.top)
        codes = scaled.floor()
        draws = torch.rand(codes.shape, generator=self._draws, dtype=torch.float64)
        codes += draws < scaled.sub_(codes)  # not ⌊s + U⌋: with large s that sum would be rounded, maybe past the top
        return dataclasses.replace(content, values=_bytes_of(codes.long(), self._options.nbytes)).push([low, high])


class _Reading(Receiving):
    def __init__(self, options: FixedFloat, size: int) -> None:
        self._options, self._size = options, size

    def decode(self, content: Content) -> Content:
        note, content = content.pop()
        low, high = _checked_range(note)
        codes = self._codes(content.values)
        if low == high:  # exactly, and -0.0 too
            return dataclasses.replace(content, values=torch.full(codes.shape, low, dtype=torch.float32))
        values = codes.double().div_(self._options.top).mul_(high - low).add_(low)
        return dataclasses.replace(content, values=values.float().clamp_(low, high))

    def _codes(self, coded: Tensor) -> Tensor:
        nbytes, top = self._options.nbytes, self._options.top
        if coded.dtype != torch.uint8 or coded.numel() % nbytes:
            raise ProtocolError(f"fixed_float: {coded.numel()} of {coded.dtype} are no codes of {nbytes} bytes")
        if coded.numel() > nbytes * self._size:
            raise ProtocolError(f"fixed_float: {coded.numel() // nbytes} codes for {self._size} keys")
        wide = torch.zeros((coded.numel() // nbytes, 8), dtype=torch.uint8)
        wide[:, :nbytes] = coded.reshape(-1, nbytes)
        codes = wide.view(-1).view(torch.int64)
        if codes.numel() and int(codes.max()) > top:
            raise ProtocolError(f"fixed_float: code {int(codes.max())} is beyond the largest, {top}")
        return codes


def _range(values: Tensor) -> tuple[float, float]:
    if not values.numel():
        return 0.0, 0.0
    low, high = torch.aminmax(values)
    return float(low), float(high)


def _checked_range(note: object) -> tuple[float, float]:
    match note:
        case [float(low), float(high)] if -_LARGEST <= low <= high <= _LARGEST:  # no NaN is
            return low, high
    raise ProtocolError("fixed_float: its note is no range [min, max] of float32 numbers")


def _bytes_of(codes: Tensor, nbytes: int) -> Tensor:
    return codes.view(torch.uint8).view(-1, 8)[:, :nbytes].reshape(-1)
