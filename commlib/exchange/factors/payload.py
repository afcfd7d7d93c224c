"""The bytes in which one rank's rows travel: as they are, or by a codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec
from commlib.exchange.buffers import ALIGN
from commlib.exchange.factors.guard import DTYPES
from commlib.exchange.factors.tap import Rows


@dataclasses.dataclass(frozen=True)
class RowCapacity:
    """Capacity of a payload: so many rows of that dtype (by a codec, always float32)."""

    rows: int = 0
    dtype: torch.dtype = torch.float32


@dataclasses.dataclass(frozen=True)
class RowPayload:
    """Layout of the rows of a layer with weight (N, M) in bytes.

    Args:
        n: outputs.
        m: inputs.
        codec: what compresses the rows, without memory; None sends them as they are.
    """

    n: int
    m: int
    codec: Compressor | None = None

    def nbytes(self, room: RowCapacity) -> int:
        """A multiple of 8, or what lies behind it could not be read where it lies."""
        return sum(self._lengths(room))

    def dtype(self, rows: Sequence[Rows], usual: torch.dtype) -> torch.dtype:
        """Dtype in which these rows travel.

        Raises:
            TypeError: in none.
        """
        found = rows[0][0].dtype if rows else usual
        if found not in DTYPES:
            raise TypeError(f"rows of {found} cannot be exchanged as factors: give the layer another route")
        return torch.float32 if self.codec is not None else found

    def write(self, body: Tensor, room: RowCapacity, rows: Sequence[Rows], seeds: tuple[int, int]) -> None:
        """Fill a payload, uint8 zeros of ``nbytes(room)``.

        Args:
            body: the payload.
            room: for at least these rows.
            rows: of all calls.
            seeds: of a random codec, for inputs and output gradients.
        """
        for i, (part, width) in enumerate(zip(self._parts(body, room), (self.m, self.n), strict=True)):
            if self.codec is None:
                _stack([r[i] for r in rows], part.view(room.dtype).view(room.rows, width))
                continue
            values = torch.zeros(room.rows, width, dtype=torch.float32, device=body.device)
            _stack([r[i] for r in rows], values)
            self.codec.compress(values, part[: self.codec.nbytes(self._spec(room, width))], seed=seeds[i])

    def read(self, body: Tensor, room: RowCapacity, count: int) -> Rows:
        """The first ``count`` rows of a payload; of what travelled as it was, views. Of no room there are none."""
        if not room.rows:
            u, v = (torch.empty(0, width, dtype=room.dtype, device=body.device) for width in (self.m, self.n))
            return u, v
        u, v = (
            self._values(part, room, width)[:count]
            for part, width in zip(self._parts(body, room), (self.m, self.n), strict=True)
        )
        return u, v

    def _values(self, part: Tensor, room: RowCapacity, width: int) -> Tensor:
        if self.codec is None:
            return part.view(room.dtype).view(room.rows, width)
        values = torch.empty(room.rows, width, dtype=torch.float32, device=part.device)
        self.codec.decompress(part[: self.codec.nbytes(self._spec(room, width))], values)
        return values

    def _parts(self, body: Tensor, room: RowCapacity) -> tuple[Tensor, Tensor]:
        if self.codec is None:
            size = room.dtype.itemsize
            end, last = room.rows * self.m * size, room.rows * (self.m + self.n) * size
            return body[:end], body[end:last]
        first, second = self._lengths(room)
        return body[:first], body[first : first + second]

    def _lengths(self, room: RowCapacity) -> tuple[int, int]:
        if self.codec is None:
            return _aligned(room.rows * (self.m + self.n) * room.dtype.itemsize), 0
        u, v = (self.codec.nbytes(self._spec(room, width)) for width in (self.m, self.n))
        return _aligned(u), _aligned(v)

    def _spec(self, room: RowCapacity, width: int) -> LayerSpec:
        return LayerSpec("rows", (room.rows, width))


def refuse(codec: Compressor) -> str | None:
    """Why rows cannot be compressed with it, or None."""
    if codec.lossless:
        return None
    if codec.slots(LayerSpec("rows", (8, 8))):
        return "it keeps a memory of its layer, and rows are others every step; without error feedback: ef=off"
    if codec.shared_seed:
        return "its ranks draw the same values, and their rows must err independently"
    return None


def _stack(parts: Sequence[Tensor], out: Tensor) -> None:
    start = 0
    for part in parts:
        out[start : start + len(part)].copy_(part)
        start += len(part)


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN
