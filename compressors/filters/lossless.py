"""``lossless``: keys and values through Zstandard, where that makes them smaller."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from commlib.codecs.filter import Content, Filter, Receiving, Sending
from commlib.errors import ProtocolError

_SAMPLE, _SHRUNK = 4096, 0.95  # bytes from the middle; what they must shrink to at most for the rest to be tried
_KINDS = {"int64": torch.int64, "float32": torch.float32, "uint8": torch.uint8}
_PARTS = {"keys": ("int64", "uint8"), "values": ("float32", "uint8")}


@dataclasses.dataclass(frozen=True)
class Lossless(Filter):
    """Keys and values are compressed, each for itself; they come back bit for bit, whatever they are.

    Zstandard sees bytes in an order that suits it: of int64 keys the differences; of numbers first all lowest bytes,
    then all second ones, and so on, for sign and exponent of gradients repeat and their last digits do not. 4 KiB from
    the middle are tried first: a part that does not shrink by 5 % there, or not at all as a whole, stays as it is.

    Layout: uint8 (m,), one Zstandard frame with its content size. The note is [of keys, of values], each None (it
    stayed as it was) or [dtype, n].

    Li et al. (OSDI 2014) compress with a general-purpose code too; differences, byte order and trying are our own.

    Args:
        level: of Zstandard, 1 to 22.
    """

    level: int = 3

    name = "lossless"
    codes = frozenset({"keys", "values"})
    lossless = True

    def __post_init__(self) -> None:
        if not 1 <= self.level <= 22:
            raise ValueError(f"lossless: level must be in [1, 22], got {self.level}")

    def sender(self, size: int, seed: int) -> Sending:
        return _Packing(self, size)

    def receiver(self, size: int) -> Receiving:
        return _Unpacking(size)


class _Packing(Sending):
    def __init__(self, options: Lossless, size: int) -> None:
        self._size = size
        self._zstd = zstandard.ZstdCompressor(level=options.level)

    def encode(self, content: Content) -> Content:
        keys, how_keys = self._pack(content.keys) if content.keys is not None else (None, None)
        values, how_values = self._pack(content.values)
        return Content(keys, values, content.notes).push([how_keys, how_values])

    def _pack(self, part: Tensor) -> tuple[Tensor, object]:
        kind, n = str(part.dtype).removeprefix("torch."), part.numel()
        if not 0 < n <= _most(kind, self._size):
            return part, None
        whole = part.contiguous().numpy()
        take = min(n, _SAMPLE // part.itemsize)
        start = (n - take) // 2
        sample = self._zstd.compress(_apart(whole[start : start + take]).data)
        if len(sample) > _SHRUNK * take * part.itemsize:
            return part, None
        packed = sample if take == n else self._zstd.compress(_apart(whole).data)
        if len(packed) >= n * part.itemsize:
            return part, None
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8), [kind, n]


class _Unpacking(Receiving):
    def __init__(self, size: int) -> None:
        self._size = size
        self._zstd = zstandard.ZstdDecompressor()

    def decode(self, content: Content) -> Content:
        match content.pop():
            case [how_keys, how_values], rest if rest.keys is not None or how_keys is None:
                keys = None if rest.keys is None else self._unpack("keys", rest.keys, how_keys)
                return Content(keys, self._unpack("values", rest.values, how_values), rest.notes)
        raise ProtocolError("lossless: its note is not two, of the keys it has and of values")

    def _unpack(self, name: str, part: Tensor, how: object) -> Tensor:
        match how:
            case None:
                return part
            case [str(kind), int(n)] if kind in _PARTS[name] and 0 < n <= _most(kind, self._size):
                if part.dtype == torch.uint8:
                    return _together(self._decompress(name, part, n * _KINDS[kind].itemsize), _KINDS[kind])
        raise ProtocolError(f"lossless: {name} are not packed as their note says, or as none can be")

    def _decompress(self, name: str, part: Tensor, nbytes: int) -> bytes:
        """Exactly so many bytes; what the frame says of itself is compared before anything is allocated for it."""
        frame = part.contiguous().numpy().data
        try:
            claimed = zstandard.get_frame_parameters(frame).content_size
            if claimed != nbytes:
                raise ProtocolError(f"lossless: a frame of {claimed} bytes as {name}, {nbytes} are due")
            raw = self._zstd.decompress(frame, max_output_size=nbytes, allow_extra_data=False)
        except zstandard.ZstdError as e:
            raise ProtocolError(f"lossless: {name} are no sound Zstandard frame: {e}") from e
        if len(raw) != nbytes:
            raise ProtocolError(f"lossless: {len(raw)} bytes as {name}, {nbytes} are due")
        return raw


def _most(kind: str, size: int) -> int:
    """Numbers of a kind that a message may have; of bytes as many as keys, which are the longest, can make."""
    return 8 * size if kind == "uint8" else size


def _apart(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    """All first bytes, then all second ones …; keys as their differences, modulo 2⁶⁴."""
    if numbers.dtype == np.int64:
        numbers = np.diff(numbers.view(np.uint64), prepend=np.uint64(0))
    return np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, numbers.itemsize).T).reshape(-1)


def _together(raw: bytes, dtype: torch.dtype) -> Tensor:
    """Tensor that :func:`_apart` was given."""
    numbers = torch.from_numpy(np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1).T.copy()).view(-1).view(dtype)
    if dtype == torch.int64:
        sums = numbers.numpy().view(np.uint64)
        np.cumsum(sums, out=sums)
    return numbers
